"""Folders in which a log says which files are data: those of Delta Lake, Iceberg and Hudi, which are refused."""

from __future__ import annotations

import os
import re

from penstock.core.errors import SourceError
from penstock.data.storage.storage import is_remote

_TABLES = {
    "a Delta Lake table": (
        r"(^|/)_delta_log/",
        "pass the files that deltalake.DeltaTable(...).file_uris() lists, if none has a deletion vector",
    ),
    "an Iceberg table": (
        r"(^|/)metadata/[^/]+\.metadata\.json$",
        "pass the files that pyiceberg's table.scan().plan_files() lists, if it lists no delete files",
    ),
    "a Hudi table": (
        r"(^|/)\.hoodie/|_\d+-\d+-\d+_\d{14,17}\.parquet$",  # FILE_TOKEN_TIME: a listing has no hidden folders
        "read it with Hudi's own library, and write Parquet files",
    ),
}
"""{table: what the name of one of its files, or folders, holds; what to do instead of reading all of its files}."""


def refuse_table(path: str, files: list[str]) -> None:
    """Raise SourceError if a folder with these files is a table of which a log says which Parquet files are data."""
    start = len(os.path.join(path, ""))
    names = [file[start:] for file in files]
    if not is_remote(path):
        names += _log_folders(path)
    for table, (mark, advice) in _TABLES.items():
        found = next((name for name in names if re.search(mark, name)), None)
        if found is not None:
            raise SourceError(
                f"{path} holds {table}, as {found} shows. Its log says which Parquet files and rows count, and to read "
                f"all of them would bring back what was overwritten and deleted: {advice}. With a pattern, as in "
                "*.parquet, all files are read as they are"
            )


def _log_folders(path: str) -> list[str]:
    """Return the folders of logs in a local folder, or in the one whose partitions (year=2026) it is of."""
    table = os.path.abspath(path)
    while "=" in os.path.basename(table):
        table = os.path.dirname(table)
    return [f"{name}/" for name in ("_delta_log", ".hoodie") if os.path.isdir(os.path.join(table, name))]
