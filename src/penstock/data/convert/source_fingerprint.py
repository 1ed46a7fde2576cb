"""The fingerprint of a source: a hash of the names, sizes and versions of its files."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from penstock.data.convert.target import files_of
from penstock.data.format import Format
from penstock.data.format_registry import format_of_path
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
    listed = (_remote_files(kind, one, storage) if is_remote(one) else files_of(os.path.abspath(one)) for one in paths)
    files = [one for some in listed for one in some if os.path.basename(one) not in _VOLATILE_FILES]
    files = [one for one in files if os.path.exists(one) or not os.path.islink(one)]  # a link may be dangling
    versions = storage.file_versions(files)
    names = "".join(f"{name}\0{one.nbytes}\0{one.version}\n" for name, one in zip(files, versions, strict=True))
    digest = hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()
    return SourceFingerprint(len(files), sum(one.nbytes for one in versions), digest)


def _remote_files(kind: Format, path: str, storage: Storage) -> list[str]:
    is_folder = kind.reads_folders and (path.endswith("/") or format_of_path(path) is None)
    return storage.list(path) if is_folder else [path]
