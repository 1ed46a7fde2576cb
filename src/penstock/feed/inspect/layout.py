"""What a format says about how its data lie: chunks, row groups, compression."""

from __future__ import annotations

import os
from typing import Any

from penstock.feed.sources.extras import need
from penstock.feed.sources.hdf5_file import LIBRARY_ERRORS
from penstock.feed.sources.storage import is_remote
from penstock.feed.sources.tables import foreign

_MOST = 64


def layout_of(format: str, paths: list[str]) -> dict[str, str]:
    """Return words about the first file, by dataset or column; {} where the format has nothing to say."""
    path = paths[0]
    if is_remote(path) or not os.path.isfile(path):
        return {}
    if path.endswith((".gz", ".tgz")):
        return {"file": "gzip"}
    if format == "hdf5":
        return _of_hdf5(path)
    return _of_parquet(path) if format == "parquet" else {}


def _of_hdf5(path: str) -> dict[str, str]:
    h5py = need("h5py", "hdf5")
    found: dict[str, str] = {}

    def note(name: str, item: Any) -> bool | None:
        if isinstance(item, h5py.Dataset):
            chunks = f"chunks {list(item.chunks)}" if item.chunks else "not chunked"
            found[name] = (
                f"{_type(h5py, item.dtype)}{list(item.shape)}, {chunks}, {item.compression or 'not compressed'}"
            )
        return True if len(found) >= _MOST else None

    try:
        with h5py.File(path, "r") as file:
            file.visititems(note)
    except LIBRARY_ERRORS:  # of another dataset than those that could be opened
        return found
    return found


def _type(h5py: Any, dtype: Any) -> str:
    if h5py.check_string_dtype(dtype) is not None:
        return "text"
    base = h5py.check_vlen_dtype(dtype)
    return f"{base} of variable length " if base is not None else str(dtype)


def _of_parquet(path: str) -> dict[str, str]:
    try:
        with need("pyarrow.parquet", "parquet").ParquetFile(path) as file:
            metadata = file.metadata
            by = metadata.created_by
            found = {"file": f"{metadata.num_row_groups} row groups, {metadata.num_rows} rows, by {by}"}
            groups = [metadata.row_group(0)] if metadata.num_row_groups else []
            columns = [group.column(number) for group in groups for number in range(min(group.num_columns, _MOST))]
            for column in columns:
                found[column.path_in_schema] = f"{column.physical_type.lower()}, {column.compression.lower()}"
    except foreign():
        return {}
    return found
