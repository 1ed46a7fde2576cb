"""Which format a path has, and which of its files are read: by suffix, or by what lies in a folder."""

from __future__ import annotations

import itertools
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable

from penstock.core.errors import SourceError
from penstock.data import format_registry
from penstock.data.format import Format
from penstock.data.format_registry import format_named, format_of_path
from penstock.data.formats.arrow import ARROW, PARQUET
from penstock.data.formats.arrow.folder_catalogs import refuse_revisions, refuse_table, saved_by_datasets
from penstock.data.formats.split_names import warn_of_splits
from penstock.data.storage.storage import Storage, is_remote, walk_files

_MAY_DESCRIBE = re.compile(r"\.json(\.\w+)?$", re.IGNORECASE)
"""What names of files end on that describe others where there are others, and else may be data."""

_MAX_PROBED_FILES = 10_000
"""Of a local folder whose format is guessed."""


def select_format(
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], format: str | None, storage: Storage
) -> tuple[Format, list[str]]:
    """Return the format of what a user passes as `path` and `format`, and the files and folders to open.

    Raises:
        SourceError: nothing is there, or nothing that has a known suffix.
    """
    if isinstance(path, Iterable) and not isinstance(path, str | bytes):
        path = [*path]  # it may be a generator
    paths = storage.expand(path)
    storage.check_there([one for one in paths if _is_file(one, format)], path)
    if format is None:
        return _guess_format_of_all(paths, storage)
    selected = format_named(format)
    files: list[str] = []
    for one in paths:
        files += _paths_in_folder(one, selected, storage, is_named=True) if _is_folder(one) else [one]
    return selected, files


def _guess_format_of_all(paths: list[str], storage: Storage) -> tuple[Format, list[str]]:
    """Return the format of the first path, which all have to have, and what to open of them all."""
    format, files = guess_format(paths[0], storage)
    if format.reads_folder_trees:
        return format, paths
    for path in paths[1:]:
        other, found = guess_format(path, storage)
        if other is not format:
            raise SourceError(
                f"{paths[0]} is {format.name}, and {path} is {other.name}; name paths of one format, or pass format="
            )
        files += found
    return format, files


def _is_folder(path: str, *, without_suffix: bool = False) -> bool:
    """Return whether a path is a folder; a remote one is where it ends on a slash, or has no suffix, if that counts."""
    return path.endswith("/") or without_suffix if is_remote(path) else os.path.isdir(path)


def _is_file(path: str, format: str | None) -> bool:
    """Return whether a path is that of one file, as far as its name says."""
    known = format_of_path(path) if format is None else format_named(format)
    if known is None or known.folder_markers:
        return False
    return not _is_folder(path, without_suffix=known.reads_folders and format_of_path(path) is None)


def guess_format(path: str, storage: Storage) -> tuple[Format, list[str]]:
    """Return the format of a file or a folder, and the paths to open; a format that reads folders gets the folder.

    A remote path is taken to be a folder if it has no known suffix, or ends on a slash.

    Raises:
        SourceError: nothing is there, or nothing that has a known suffix.
    """
    format = format_of_path(path)
    is_folder = _is_folder(path, without_suffix=format is None)
    if format is not None and (format.folder_markers or not is_folder):
        return format, [path]
    if not is_remote(path) and not os.path.exists(path):
        raise SourceError(f"there is no file {path!r}")
    if not is_folder:
        known = ", ".join(suffix for one in format_registry.FORMATS for suffix in one.suffixes)
        raise SourceError(f"{path} has no known suffix ({known}); pass format=")
    files = storage.list(path) if is_remote(path) else [*itertools.islice(walk_files(path), _MAX_PROBED_FILES)]
    for one in format_registry.FORMATS:
        if _is_marked(path, files, one):
            return one, [path]
    return _most_common_format(path, files, storage)


def _most_common_format(path: str, files: list[str], storage: Storage) -> tuple[Format, list[str]]:
    entries = _data_sets(path, files)
    strong = [entry for entry in entries if not _MAY_DESCRIBE.search(entry) and format_of_path(entry) is not None]
    formats = ((entry, format_of_path(entry)) for entry in strong or entries)
    counted = Counter(
        format.name
        for entry, format in formats
        if format is not None and (format.reads_folder_trees or not _is_bookkeeping(path, entry))
    )
    if not counted:
        raise SourceError(
            f"the folder {path} has no file with a known suffix, but for names that begin with _ or a dot; pass format="
        )
    (name, _), *others = counted.most_common()
    format = format_named(name)
    if others and not format.reads_folder_trees:
        raise SourceError(
            f"the folder {path} holds {', '.join(f'{count} of {one}' for one, count in counted.most_common())}; "
            "pass format=, or name the files"
        )
    return format, _paths_in_folder(path, format, storage)


def _paths_in_folder(path: str, format: Format, storage: Storage, *, is_named: bool = False) -> list[str]:
    """Return what a format opens of a folder: its files, or the folder itself. `is_named`: by the user, by format=.

    Raises:
        SourceError: it has none, several splits, or files of which a log says which count.
    """
    if format.reads_folder_trees or (format.folder_markers and format_of_path(path) is format):
        return [path]
    files = storage.list(path)
    if _is_marked(path, files, format):
        return [path]
    if format is PARQUET:
        refuse_table(path, files)
    entries = _without_bookkeeping(path, _files_of_format(path, files, format, is_named=is_named))
    if format is ARROW:
        entries = saved_by_datasets(path, files, entries, storage)
    if not entries:
        raise SourceError(f"the folder {path} holds no {format.name}")
    refuse_revisions(path, entries)
    start = len(os.path.join(path, ""))
    warn_of_splits(path, (entry[start:] for entry in entries), "which are read as one")
    return entries


def _files_of_format(path: str, files: list[str], format: Format, *, is_named: bool) -> list[str]:
    """Return the files with a suffix of a format; if none has one and the user names it, those without a known one."""
    entries = _data_sets(path, files)
    found = [entry for entry in entries if format_of_path(entry) is format]
    strong = [entry for entry in found if not _MAY_DESCRIBE.search(entry)]
    if strong or not is_named or format.folder_markers:
        return strong or found
    without_suffix = [one for one in entries if format_of_path(one) is None and not _is_bookkeeping(path, one)]
    return sorted([*(one for one in found if not _is_bookkeeping(path, one)), *without_suffix])


def _without_bookkeeping(path: str, entries: list[str]) -> list[str]:
    """Return the files of a folder whose names do not begin with _, and warn of the others."""
    left_out = [entry for entry in entries if _is_bookkeeping(path, entry)]
    if not left_out:
        return entries
    warnings.warn(
        f"left out: {len(left_out)} of the files in {path}, as their names or folders begin with _ like those of "
        f"unfinished and internal files: {left_out[0]} ...; rename them, or name the files, to read them",
        stacklevel=2,
    )
    return [entry for entry in entries if not _is_bookkeeping(path, entry)]


def _is_bookkeeping(path: str, entry: str) -> bool:
    """Return whether a name below a folder begins with _, as Spark and others name what is no data.

    They may be columns of Hive partitions, too.

    >>> [_is_bookkeeping("_in/", f"_in/{name}") for name in ("_temporary/0/a.csv", "a/_b.csv", "_year=2026/a.csv")]
    [True, True, False]
    """
    names = entry[len(path.rstrip("/")) + 1 :].split("/")
    return any(name.startswith("_") and "=" not in name for name in names)


def _is_marked(path: str, files: list[str], format: Format) -> bool:
    """Return whether a folder is one data set of a format. `files` is what a remote folder holds."""
    markers = {os.path.join(path, name) for name in format.folder_markers}
    return not markers.isdisjoint(files) if is_remote(path) else any(map(os.path.exists, markers))


def _data_sets(path: str, files: list[str]) -> list[str]:
    """Return the files of a folder, with one entry for all files of a data set that is a folder itself, like a.zarr.

    >>> _data_sets("data/", ["data/a.zarr/x/0", "data/a.zarr/x/1", "data/b.csv", "data/c.lmdb/lock.mdb"])
    ['data/a.zarr', 'data/b.csv', 'data/c.lmdb']
    """
    start = len(path.rstrip("/")) + 1
    suffixes = tuple(suffix for one in format_registry.FORMATS if one.folder_markers for suffix in one.suffixes)
    without_data = {name for one in format_registry.FORMATS for name in one.files_without_data}
    entries: dict[str, None] = {}
    for file in files:
        slashes = (at for at, letter in enumerate(file) if letter == "/" and at > start)
        folder = next((file[:at] for at in slashes if file[:at].lower().endswith(suffixes)), None)
        if folder is not None or os.path.basename(file) not in without_data:
            entries[folder or file] = None
    return list(entries)
