"""The formats: their names, how their files are called, which module reads them. Modules are imported when needed."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from penstock.core.errors import SourceError
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

    def load(self) -> Any:
        """Return the module.

        Raises:
            ExtraError: the package that it needs is not installed.
        """
        return import_module(f"{_PACKAGE}.{self.module}")


FORMATS = (
    Format(name="images", module="image_folder", suffixes=(".jpg", ".jpeg", ".png", ".webp")),
    Format(name="hdf5", module="hdf5", suffixes=(".h5", ".hdf5", ".hdf")),
    Format(name="parquet", module="parquet", suffixes=(".parquet",)),
    Format(name="arrow", module="arrow", suffixes=(".arrow", ".feather")),
    Format(name="tokens", module="tokens", suffixes=(".npy", ".bin")),
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
    if found is not None and (found.name in ("lmdb", "zarr") or not is_folder):
        return found, [path]
    if not is_folder:
        known = ", ".join(suffix for one in FORMATS for suffix in one.suffixes)
        raise SourceError(f"{path} has no name that tells its format ({known}); say format=")
    files = storage.list(path) if is_remote(path) else [*itertools.islice(_walked(path), _LOOKED_AT)]
    own = {file.removeprefix(path).lstrip("/") for file in files}
    if "data.mdb" in own:
        return named("lmdb"), [path]
    if own & {"zarr.json", ".zgroup", ".zarray"} or any(_is_zarr(path, name) for name in (".zgroup", ".zarray")):
        return named("zarr"), [path]
    counted = Counter(one.name for file in files if (one := of_path(file)) is not None)
    if not counted:
        raise SourceError(f"the folder {path} has no file whose name tells a format; say format=")
    (most, _), *others = counted.most_common()
    if others and most not in ("images", "video"):
        raise SourceError(
            f"the folder {path} holds {', '.join(f'{count} of {name}' for name, count in counted.most_common())}; "
            "say format=, or name the files"
        )
    if most in ("images", "video"):  # which look through their folders by themselves
        return named(most), [path]
    return named(most), [file for file in storage.list(path) if of_path(file) is named(most)]


def _walked(path: str) -> Iterator[str]:
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(folder, name) for name in sorted(names) if not name.startswith("."))


def _is_zarr(path: str, name: str) -> bool:
    """Say whether a local folder has a file whose name begins with a dot, which listing leaves out."""
    return not is_remote(path) and os.path.exists(os.path.join(path, name))
