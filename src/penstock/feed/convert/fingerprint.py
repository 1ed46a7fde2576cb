"""The fingerprint of a source: which files it has, their sizes and versions. Other files give another one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.feed.sources.formats import Format, files_of
from penstock.feed.sources.storage import Storage, is_remote

_COMES_AND_GOES = ("lock.mdb",)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of the files that a path stands for."""

    files: int
    nbytes: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        """Return it for a journal."""
        return {"files": self.files, "nbytes": self.nbytes, "digest": self.digest}


def fingerprint(kind: Format, paths: list[str], storage: Storage) -> Fingerprint:
    """Return the fingerprint of what a format reads; nothing is read.

    Raises:
        SourceError: a file is not there.
    """
    digest, files, nbytes = hashlib.sha256(), 0, 0
    for name, size, version in _found(kind, paths, storage):
        digest.update(f"{name}\0{size}\0{version}\n".encode("utf-8", "surrogateescape"))
        files += 1
        nbytes += size
    return Fingerprint(files, nbytes, digest.hexdigest())


def _found(kind: Format, paths: list[str], storage: Storage) -> Iterator[tuple[str, int, str]]:
    """Yield the name, size and version of every file."""
    remote = files_of(kind, [path for path in paths if is_remote(path)], storage)
    for url, stamp in zip(remote, storage.stamps(remote), strict=True):
        yield url, stamp.nbytes, stamp.version
    for path in (os.path.abspath(path) for path in paths if not is_remote(path)):
        if os.path.isdir(path):
            yield from _inside(path)
        else:
            stamp = storage.stamps([path])[0]
            yield path, stamp.nbytes, stamp.version


def _inside(path: str) -> Iterator[tuple[str, int, str]]:
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            if name not in _COMES_AND_GOES:
                file = os.path.join(folder, name)
                status = os.stat(file, follow_symlinks=os.path.exists(file))  # a link may lead nowhere
                yield file, status.st_size, str(status.st_mtime_ns)
