"""The fingerprint of a source: a hash of the names, sizes and versions of its files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.errors import SourceError
from penstock.data.convert.target import files_of
from penstock.data.format import Format
from penstock.data.select_format import list_files
from penstock.data.storage.storage import Storage, is_remote

_VOLATILE_FILES = ("lock.mdb",)


@dataclass(frozen=True, slots=True)
class SourceFingerprint:
    """Fingerprint of the files that a path stands for."""

    files: int
    nbytes: int
    digest: str


def fingerprint_source(kind: Format, paths: list[str], storage: Storage) -> SourceFingerprint:
    """Return the fingerprint of what a format would read; no file is opened."""
    digest, files, nbytes = hashlib.sha256(), 0, 0
    for name, size, version in _list_files(kind, paths, storage):
        digest.update(f"{name}\0{size}\0{version}\n".encode("utf-8", "surrogateescape"))
        files += 1
        nbytes += size
    return SourceFingerprint(files, nbytes, digest.hexdigest())


def _list_files(kind: Format, paths: list[str], storage: Storage) -> Iterator[tuple[str, int, str]]:
    """Yield the name, size and version of every file."""
    remote = list_files(kind, [path for path in paths if is_remote(path)], storage)
    for url, version in zip(remote, storage.file_versions(remote), strict=True):
        yield url, version.nbytes, version.version
    for path in (os.path.abspath(path) for path in paths if not is_remote(path)):
        if not os.path.exists(path):
            raise SourceError(f"there is no file {path!r}")
        for file in files_of(path):
            if os.path.basename(file) not in _VOLATILE_FILES:
                status = os.stat(file, follow_symlinks=os.path.exists(file))  # a link may be dangling
                yield file, status.st_size, str(status.st_mtime_ns)
