"""Folders of which another program says which files are data: table formats, and Hugging Face's datasets.

    Delta Lake, Iceberg, Hudi   have a log of versions, and most Parquet files may be of older ones; refused
    save_to_disk                lists its files in state.json
    load_dataset                has the split in a file's name, and dataset_info.json beside it
    the Hub's cache             has a folder for each revision of a repository; several are refused

save_to_disk and load_dataset keep results of `map`, `filter` and `shuffle` beside the data, as cache-*.arrow.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from penstock.core.errors import SourceError
from penstock.data.storage.storage import Storage, is_remote

_MOST_NBYTES = 64 << 20
"""Of a JSON file."""

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

_SHARD = re.compile(r"-\d{5,}-of-\d{5,}\.arrow$")
"""load_dataset's files are NAME-SPLIT.arrow, or NAME-SPLIT-00000-of-00008.arrow."""

_REVISION = re.compile(r"(?P<repository>.*)/snapshots/[0-9a-f]{40}(?=/)")
"""The cache of the Hub keeps each revision of a repository that it was asked for, with links to the same files."""

_MOST_NAMES = 8
"""In a message."""


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


def refuse_revisions(path: str, entries: list[str]) -> None:
    """Raise SourceError if files of a folder are of several revisions of a repository of Hugging Face's Hub."""
    revisions: dict[str, str] = {}
    for match in filter(None, map(_REVISION.match, entries)):
        if revisions.setdefault(match["repository"], match[0]) != match[0]:
            raise SourceError(
                f"{path} is a cache of Hugging Face's Hub with several revisions of a repository, which have most "
                f"samples in common; open one of them, as in {match[0]}"
            )


def saved_by_datasets(path: str, files: list[str], entries: list[str], storage: Storage) -> list[str]:
    """Return those Arrow files (`entries`) of a folder that are data, as far as Hugging Face's datasets has written it.

    Raises:
        SourceError: the folder has several splits, and those for tests are among them.
    """
    there = set(files)
    splits = _json(path, "dataset_dict.json", there, storage).get("splits")
    if splits:
        raise SourceError(
            f"{path} is a DatasetDict of Hugging Face's, with the splits {', '.join(map(str, splits))}; open one of "
            f"them: {os.path.join(path, str(splits[0]))}"
        )
    by_folder: dict[str, list[str]] = {}
    for entry in entries:
        by_folder.setdefault(os.path.dirname(entry), []).append(entry)
    found: list[str] = []
    of_load_dataset: list[str] = []
    for folder, inside in by_folder.items():
        saved = _json(folder, "state.json", there, storage).get("_data_files")
        if isinstance(saved, list):
            found += [entry for entry in inside if {"filename": os.path.basename(entry)} in saved]
        elif os.path.join(folder, "dataset_info.json") in there:
            of_load_dataset += [entry for entry in inside if not os.path.basename(entry).startswith("cache-")]
        else:
            found += inside
    _check_one_split(path, of_load_dataset)
    return sorted(found + of_load_dataset)


def _check_one_split(path: str, entries: list[str]) -> None:
    """Raise SourceError if the files of load_dataset's cache are of several splits, or data sets."""
    splits = list(dict.fromkeys(_SHARD.sub("-*.arrow", entry) for entry in entries))
    if len(splits) > 1:
        start = len(os.path.join(path, ""))
        raise SourceError(
            f"{path} is a cache of Hugging Face's load_dataset, with {len(splits)} splits, or data sets: "
            f"{', '.join(one[start:] for one in splits[:_MOST_NAMES])}; open one of them, as in {splits[-1]}"
        )


def _json(folder: str, name: str, there: set[str], storage: Storage) -> dict[str, Any]:
    """Return what a JSON file has; nothing if it is not `there`."""
    path = os.path.join(folder, name)
    if path not in there:
        return {}
    try:
        found = json.loads(storage.read(path, _MOST_NBYTES))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
