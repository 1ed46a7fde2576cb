"""Describes how a file stores its data: chunks, row groups, compression."""

from __future__ import annotations

import os
from typing import Any

from penstock.data.formats.array_columns import LIBRARY_ERRORS
from penstock.data.formats.arrow.table_source import arrow_errors
from penstock.data.optional import need
from penstock.data.storage.storage import is_remote

_MAX_DATASETS = 64


def describe_layout(format: str, paths: list[str]) -> dict[str, str]:
    """Return a description of the first file, by dataset or column; {} for formats without chunks."""
    path = paths[0]
    if is_remote(path) or not os.path.isfile(path):
        return {}
    if path.endswith((".gz", ".tgz")):
        return {"file": "gzip"}
    if format == "hdf5":
        return _describe_hdf5(path)
    return _describe_parquet(path) if format == "parquet" else {}


def _describe_hdf5(path: str) -> dict[str, str]:
    h5py = need("h5py", "hdf5")
    found: dict[str, str] = {}

    def note(name: str, item: Any) -> bool | None:
        if isinstance(item, h5py.Dataset):
            chunks = f"chunks {list(item.chunks)}" if item.chunks else "not chunked"
            found[name] = (
                f"{_type_text(h5py, item.dtype)}{list(item.shape)}, {chunks}, {item.compression or 'not compressed'}"
            )
        return True if len(found) >= _MAX_DATASETS else None

    try:
        with h5py.File(path, "r") as file:
            file.visititems(note)
    except LIBRARY_ERRORS:  # a dataset that is broken, and that the source does not read
        return found
    return found


def _type_text(h5py: Any, dtype: Any) -> str:
    if h5py.check_string_dtype(dtype) is not None:
        return "text"
    base = h5py.check_vlen_dtype(dtype)
    return f"{base} of variable length " if base is not None else str(dtype)


def _describe_parquet(path: str) -> dict[str, str]:
    try:
        with need("pyarrow.parquet", "parquet").ParquetFile(path) as file:
            metadata = file.metadata
            writer = metadata.created_by
            found = {"file": f"{metadata.num_row_groups} row groups, {metadata.num_rows} rows, by {writer}"}
            groups = [metadata.row_group(0)] if metadata.num_row_groups else []
            columns = [
                group.column(number) for group in groups for number in range(min(group.num_columns, _MAX_DATASETS))
            ]
            for column in columns:
                found[column.path_in_schema] = f"{column.physical_type.lower()}, {column.compression.lower()}"
    except arrow_errors():
        return {}
    return found
