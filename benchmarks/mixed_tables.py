"""Folders of Arrow or Parquet files that differ in unit or dtype, for `fuzz`."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_folders(folder: Path, suffix: str) -> list[Path]:
    """Write a folder of files in several units, and one of files in several dtypes; return both.

    All values of the first, in nanoseconds, are 0, 1000, 2000 ...
    """
    import pyarrow as pa

    units: list[tuple[Any, int]] = [(pa.timestamp("us"), 1), (pa.timestamp("ns"), 1000)]
    dtypes: list[tuple[Any, int]] = [(pa.int64(), 1), (pa.int32(), 1)]
    found = []
    for name, types in (("units", units), ("dtypes", dtypes)):
        (folder / name).mkdir()
        found.append(folder / name)
        for number, (type, step) in enumerate(types):
            first = 4 * number
            array = pa.array([step * value for value in range(first, first + 4)], type)
            _write(pa.table({"x": array}), folder / name / f"{number}{suffix}")
    return found


def _write(table: Any, path: Path) -> None:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        pq.write_table(table, path)
        return
    import pyarrow as pa

    with pa.ipc.new_file(str(path), table.schema) as sink:
        sink.write_table(table)
