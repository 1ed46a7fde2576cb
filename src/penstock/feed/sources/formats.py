"""The formats: their names, how their files are called, which module reads them. Modules are imported when needed."""

from __future__ import annotations

import inspect
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from penstock.core.errors import OptionError, SourceError
from penstock.feed.sources.storage import Storage, is_remote

_PACKAGE = "penstock.feed.sources"
_LOOKED_AT = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One format."""

    name: str
    """As `format=` of `penstock.open` says it."""

    module: str
    """Reads it: `opened(paths, *, storage, fields, errors, **options)`; and writes it, see `Writer`."""

    suffixes: tuple[str, ...]
    """What its files' names end on."""

    whole: Mapping[str, Any] = field(default_factory=dict)
    """Options with which nothing of a file is left out: what a conversion takes."""

    def load(self) -> Any:
        """Return the module.

        Raises:
            ExtraError: the package that it needs is not installed.
        """
        return import_module(f"{_PACKAGE}.{self.module}")

    def check_options(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        """Refuse options that a function of the module does not have.

        Raises:
            OptionError: it lacks one.
        """
        keyword = inspect.Parameter.KEYWORD_ONLY
        found = [one.name for one in inspect.signature(function).parameters.values() if one.kind is keyword]
        known = [name for name in found if name not in ("storage", "fields", "errors")]
        for name in options:
            if name not in known:
                there = ", ".join(f"{one}=" for one in known) or "none"
                raise OptionError(f"{self.name} has no option {name}=; it has {there} ({_PACKAGE}.{self.module})")


FORMATS = (
    Format(name="images", module="image_folder", suffixes=(".jpg", ".jpeg", ".png", ".webp")),
    Format(name="hdf5", module="hdf5", suffixes=(".h5", ".hdf5", ".hdf")),
    Format(name="parquet", module="parquet", suffixes=(".parquet",)),
    Format(name="arrow", module="arrow", suffixes=(".arrow", ".feather")),
    Format(name="tokens", module="tokens", suffixes=(".npy", ".bin"), whole={"pack": False}),
    Format(name="lmdb", module="lmdb", suffixes=(".lmdb", ".mdb")),
    Format(name="zarr", module="zarr", suffixes=(".zarr",)),
    Format(name="video", module="video", suffixes=(".mp4", ".mkv", ".webm", ".mov", ".avi")),
    Format(name="tfrecord", module="tfrecord", suffixes=(".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz")),
    Format(name="tar", module="tar", suffixes=(".tar", ".tar.gz", ".tgz")),
    Format(name="jsonl", module="jsonl", suffixes=(".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")),
    Format(name="csv", module="csv", suffixes=(".csv", ".tsv", ".csv.gz", ".tsv.gz")),
)


FOLDERS = ("images", "lmdb", "video", "zarr")
"""Formats whose data may be a folder."""

_OWN_FOLDERS = {"lmdb": ("data.mdb",), "zarr": ("zarr.json", ".zgroup", ".zarray")}
"""Formats whose data may be a folder that is one data set, and what lies in such a folder."""

_BESIDE = ("lock.mdb",)
"""Files that have a format's ending, and no data."""


def named(name: str) -> Format:
    """Return the format with this name.

    Raises:
        SourceError: there is none.
    """
    for one in FORMATS:
        if one.name == name:
            return one
    raise SourceError(f"there is no format {name!r}; there are {', '.join(one.name for one in FORMATS)}")


def of_path(path: str) -> Format | None:
    """Return the format that a file's name says it has; None where it says nothing.

    >>> of_path("s3://bucket/train-000.tar").name, of_path("train.txt")
    ('tar', None)
    """
    lower = path.rstrip("/").lower()
    return next((one for one in FORMATS if lower.endswith(one.suffixes)), None)


def guessed(path: str, storage: Storage) -> tuple[Format, list[str]]:
    """Return the format of a file or a folder, and its files; a format whose data are a folder gets the folder.

    A remote path is a folder where its name tells no format, or ends on a slash.

    Raises:
        SourceError: there is nothing, or nothing that has a known name.
    """
    found = of_path(path)
    is_folder = (found is None or path.endswith("/")) if is_remote(path) else os.path.isdir(path)
    if found is not None and (found.name in _OWN_FOLDERS or not is_folder):
        return found, [path]
    if not is_remote(path) and not os.path.exists(path):
        raise SourceError(f"there is no file {path!r}")
    if not is_folder:
        known = ", ".join(suffix for one in FORMATS for suffix in one.suffixes)
        raise SourceError(f"{path} has no name that tells its format ({known}); say format=")
    files = storage.list(path) if is_remote(path) else [*itertools.islice(_walked(path), _LOOKED_AT)]
    for name in _OWN_FOLDERS:
        if _is_own(path, files, name):
            return named(name), [path]
    counted = Counter(one.name for entry in _entries(path, files) if (one := of_path(entry)) is not None)
    if not counted:
        raise SourceError(f"the folder {path} has no file whose name tells a format; say format=")
    (most, _), *others = counted.most_common()
    if others and most not in ("images", "video"):
        raise SourceError(
            f"the folder {path} holds {', '.join(f'{count} of {name}' for name, count in counted.most_common())}; "
            "say format=, or name the files"
        )
    return named(most), _inside(path, named(most), storage)


def chosen(
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], format: str | None, storage: Storage
) -> tuple[Format, list[str]]:
    """Return the format of what a user calls `path`, and the files and folders that it reads.

    Args:
        path: as for `penstock.open`.
        format: its name; told from the first file where it is None.
        storage: knows where they lie.

    Raises:
        SourceError: there is nothing, or nothing that has a known name.
    """
    paths = storage.expand(path)
    if format is None:
        kind, found = guessed(paths[0], storage)
        return kind, found if len(paths) == 1 else paths
    kind, first = named(format), paths[0]
    is_folder = first.endswith("/") if is_remote(first) else os.path.isdir(first)
    if len(paths) == 1 and is_folder:
        paths = _inside(first, kind, storage)
        if not paths:
            raise SourceError(f"the folder {first} holds no {format}")
    return kind, paths


def files_of(kind: Format, paths: list[str], storage: Storage) -> list[str]:
    """Return all files of what a format reads: a folder's, too."""
    found = []
    for path in paths:
        may_be = kind.name in FOLDERS and (path.endswith("/") or of_path(path) is None)
        found += storage.list(path) if (may_be if is_remote(path) else os.path.isdir(path)) else [path]
    return found


def _inside(path: str, kind: Format, storage: Storage) -> list[str]:
    """Return the files of a format in a folder; the folder, where that is what the format reads."""
    if kind.name in FOLDERS and (kind.name not in _OWN_FOLDERS or of_path(path) is kind):
        return [path]
    files = storage.list(path)
    if kind.name in _OWN_FOLDERS and _is_own(path, files, kind.name):
        return [path]
    return [entry for entry in _entries(path, files) if of_path(entry) is kind]


def _is_own(path: str, files: list[str], name: str) -> bool:
    """Say whether a folder is one data set of a format, by a file in it: of a remote one, among `files`."""
    marks = {os.path.join(path, mark) for mark in _OWN_FOLDERS[name]}
    return not marks.isdisjoint(files) if is_remote(path) else any(map(os.path.exists, marks))


def _entries(path: str, files: list[str]) -> list[str]:
    """Return the files of a folder, and in the place of those in a folder like a.zarr, that.

    >>> _entries("data/", ["data/a.zarr/x/0", "data/a.zarr/x/1", "data/b.csv", "data/c.lmdb/lock.mdb"])
    ['data/a.zarr', 'data/b.csv', 'data/c.lmdb']
    """
    start = len(path.rstrip("/")) + 1
    endings = tuple(suffix for name in _OWN_FOLDERS for suffix in named(name).suffixes)
    found: dict[str, None] = {}
    for file in files:
        places = (at for at, letter in enumerate(file) if letter == "/" and at > start)
        folder = next((file[:at] for at in places if file[:at].lower().endswith(endings)), None)
        if folder is not None or os.path.basename(file) not in _BESIDE:
            found[folder or file] = None
    return list(found)


def _walked(path: str) -> Iterator[str]:
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(folder, name) for name in sorted(names) if not name.startswith("."))
