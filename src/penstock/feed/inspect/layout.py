"""What a format says about how its data lie: chunks, row groups, compression."""

from __future__ import annotations

import os
from typing import Any

from penstock.feed.sources.extras import need
from penstock.feed.sources.storage import is_remote

_MOST = 64


def layout_of(format: str, paths: list[str]) -> dict[str, str]:
    """Return words about the first file, by dataset or column; {} where the format has nothing to say."""
    if is_remote(paths[0]):
        return {}
    if paths[0].endswith((".gz", ".tgz")):
        return {"file": "gzip"}
    if format == "hdf5" and os.path.isfile(paths[0]):
        return _of_hdf5(paths[0])
    if format == "parquet" and os.path.isfile(paths[0]):
        return _of_parquet(paths[0])
    return {}


def _of_hdf5(path: str) -> dict[str, str]:
    h5py = need("h5py", "hdf5")
    found: dict[str, str] = {}

    def note(name: str, item: Any) -> bool | None:
        if isinstance(item, h5py.Dataset):
            chunks = f"chunks {list(item.chunks)}" if item.chunks else "not chunked"
            found[name] = f"{item.dtype}{list(item.shape)}, {chunks}, {item.compression or 'not compressed'}"
        return True if len(found) >= _MOST else None

    with h5py.File(path, "r") as file:
        file.visititems(note)
    return found


def _of_parquet(path: str) -> dict[str, str]:
    metadata = need("pyarrow.parquet", "parquet").ParquetFile(path).metadata
    found = {"file": f"{metadata.num_row_groups} row groups, {metadata.num_rows} rows, by {metadata.created_by}"}
    if metadata.num_row_groups:
        group = metadata.row_group(0)
        for number in range(min(group.num_columns, _MOST)):
            column = group.column(number)
            found[column.path_in_schema] = f"{column.physical_type.lower()}, {column.compression.lower()}"
    return found
