"""A target in an object store, made in a folder of this machine and uploaded when it is complete.

Others never see a half of it:

work       formats seek while they write, and objects cannot: files are written, joined and verified in the user's
           cache folder, in a folder that is named after the target, so that the same command resumes
upload     an object appears when all of its bytes have arrived; without `overwrite` only where there is none (the
           store decides that, not a look before). A local file is removed when its object has been checked
killed     the same command uploads the files that are left; an object with the same bytes was uploaded before
verified   besides the samples, which were compared before, the objects' bytes are read again
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from penstock.core.errors import OptionError, SourceError
from penstock.core.urls import redact_url
from penstock.data.convert.target import SIX_DIGITS, Target, clear_partial_folder
from penstock.data.storage import remote_file
from penstock.data.storage.cache.disk_cache import user_folder
from penstock.data.storage.retries import Retries
from penstock.data.storage.storage import Storage

_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")
_READ_NBYTES = 1 << 20
_UPLOADS = 4


class RemoteTarget(Target):
    """Files that a conversion writes to an object store."""

    def check(self) -> None:
        """Check that the store and the format can do it."""
        scheme = self.path.partition("://")[0]
        local = f"choose a local path, and upload the result, as with fsspec.filesystem({scheme!r}).put(...)"
        if scheme not in _OBJECT_STORES:
            raise OptionError(
                f"{redact_url(self.path)}: results are written to this machine and to {', '.join(_OBJECT_STORES)}, "
                f"where a file appears when all of it is there; on {scheme}:// others might read half of it: {local}"
            )
        if self.kind.writes_folders or (self.kind.folder_markers and not self.suffix):
            raise OptionError(
                f"{self.path}: {self.kind.name} is written as a folder of files, and the objects of a folder cannot "
                f"appear together, so others might read a part of it: {local}, or another format (tar, parquet)"
            )

    @property
    def partial_folder(self) -> str:
        """The folder of this machine for unfinished files."""
        digest = hashlib.sha256(self.path.encode()).hexdigest()[:12]
        name = os.path.basename(self.path).translate(str.maketrans("{}", "()"))
        return os.path.join(user_folder("convert"), f"{digest}-{name}.partial")

    def existing_files(self) -> list[str]:
        """Return those of its objects that exist."""
        if self.is_numbered:
            return remote_file.each([self._numbered(SIX_DIGITS)], Retries(), lambda backend, url: backend.glob(url))[0]
        names = self.names(1)
        exist = remote_file.each(names, Retries(), lambda backend, url: backend.exists(url))
        return [name for name, exists in zip(names, exist, strict=True) if exists]

    def check_folder(self) -> None:
        """Do nothing: object stores have no folders that would have to be there."""

    def nbytes(self, names: Sequence[str]) -> int:
        """Return the bytes of its objects."""
        return sum(version.nbytes for version in remote_file.file_versions(names, Retries()))

    def publish(self, folders: list[str], *, overwrite: bool, verify: bool) -> list[str]:
        """Upload the finished files in `partial_folder`; can be repeated after a kill."""
        names = self.names(len(folders))

        def upload(folder: str, name: str) -> None:
            for path, url in self._moves(folder, name):
                _upload(path, url, overwrite=overwrite, verify=verify)
                os.remove(path)

        with ThreadPoolExecutor(_UPLOADS) as pool:
            for _ in pool.map(upload, folders, names):
                pass
        if overwrite:
            stale = sorted({*self.existing_files()} - {*names})
            remote_file.each(stale, Retries(), lambda backend, url: backend.remove(url))
        clear_partial_folder(self.partial_folder)
        return names


def _upload(path: str, url: str, *, overwrite: bool, verify: bool) -> None:
    is_new = remote_file.each([url], Retries(), lambda backend, url: backend.put(path, url, overwrite=overwrite))[0]
    if not _is_same(path, url, reads=verify or not is_new):
        raise SourceError(
            f"{redact_url(url)} has other bytes than were uploaded; repeat the command with --overwrite"
            if is_new
            else f"{redact_url(url)} exists; move it away, and repeat the command to resume"
        )


def _is_same(path: str, url: str, *, reads: bool) -> bool:
    """Return whether an object has the size of a file; with `reads`, its bytes."""
    if Storage().nbytes(url) != os.path.getsize(path):
        return False
    if not reads:
        return True
    with open(path, "rb") as file, Storage().open(url) as uploaded:
        while expected := file.read(_READ_NBYTES):
            if uploaded.read(len(expected)) != expected:
                return False
    return True
