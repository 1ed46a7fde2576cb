"""A copy that this process is making in the cache."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from penstock.core.errors import SourceError
from penstock.data.storage.file_lock import unlock_and_close


class PartialCopy:
    """A copy that this process is making. `finish` renames it to its final name; without that `close` removes it.

    Args:
        descriptor: of the locked file; owned by this object.
        partial_path: the file's path now.
        path: its path when it is complete.
        nbytes: its size when it is complete.
    """

    def __init__(self, descriptor: int, partial_path: str, path: str, nbytes: int) -> None:
        self.written = 0
        self.nbytes = nbytes
        self._descriptor = descriptor
        self._partial_path = partial_path
        self._path = path
        self._pid = os.getpid()

    def __enter__(self) -> PartialCopy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether it can be written to: it is not closed, and this process is not a fork of the one that began it."""
        return self._descriptor >= 0 and self._pid == os.getpid()

    def write(self, data: Any) -> None:
        """Append bytes."""
        view = memoryview(data)
        with translate_errors(self._path, self.nbytes):
            while len(view):
                count = os.pwrite(self._descriptor, view, self.written)
                self.written += count
                view = view[count:]

    def finish(self) -> None:
        """Sync the copy to the disk and rename it."""
        if self.written != self.nbytes:
            name = os.path.basename(self._path)
            raise SourceError(f"a copy of {name} has {self.written} bytes instead of {self.nbytes}")
        with translate_errors(self._path, self.nbytes):
            os.fsync(self._descriptor)
            os.rename(self._partial_path, self._path)
        self._release()

    def close(self) -> None:
        """Remove the copy unless it is finished."""
        if self.is_open:
            with suppress(FileNotFoundError):
                os.unlink(self._partial_path)
            self._release()

    def _release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        unlock_and_close(descriptor)


@contextmanager
def translate_errors(path: str, nbytes: int) -> Iterator[None]:
    """Raise SourceError for a failed operation on the copy at `path`, or on what will be it."""
    try:
        yield
    except OSError as error:
        folder, name = os.path.split(path)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(folder).free
            raise SourceError(
                f"a copy of {name} needs {nbytes} bytes, and the disk of {folder} has {free} free; free some, or "
                "choose a folder on another disk: cache="
            ) from error
        raise SourceError(
            f"a copy of {name} cannot be made in {folder}: {error}; choose another folder: cache="
        ) from error
