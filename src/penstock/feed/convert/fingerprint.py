"""The fingerprint of a source: which files it has, their sizes and times. Other files give another one."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any

from penstock.feed.sources.formats import of_path
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


def fingerprint(path: str | tuple[str, ...], storage: Storage | None = None) -> Fingerprint:
    """Return the fingerprint of what `path` stands for; nothing is read.

    Raises:
        SourceError: there is no such file.
    """
    storage = storage or Storage()
    digest, files, nbytes = hashlib.sha256(), 0, 0
    for one in storage.expand(path):
        for name, size, mtime_ns in _found(one, storage):
            digest.update(f"{name}\0{size}\0{mtime_ns}\n".encode("utf-8", "surrogateescape"))
            files += 1
            nbytes += size
    return Fingerprint(files, nbytes, digest.hexdigest())


def _found(path: str, storage: Storage) -> list[tuple[str, int, int]]:
    if is_remote(path):
        is_folder = path.endswith("/") or of_path(path) is None
        return [(url, storage.nbytes(url), 0) for url in (storage.list(path) if is_folder else [path])]
    path = os.path.abspath(path)
    if not os.path.isdir(path):
        size = storage.nbytes(path)
        return [(path, size, os.stat(path).st_mtime_ns)]
    found = []
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            if name not in _COMES_AND_GOES:
                file = os.path.join(folder, name)
                status = os.lstat(file)
                found.append((file, status.st_size, status.st_mtime_ns))
    return found
