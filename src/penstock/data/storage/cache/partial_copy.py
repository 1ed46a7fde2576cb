"""A copy that this process is making in the cache, and its checksum, which is the time of its last change."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.storage.file_lock import unlock_and_close

_PRIME = (1 << 31) - 1


class Checksum:
    """The sum of all 64-bit words, as seconds since 1970: any flipped byte changes it; ten times as fast as a CRC.

    >>> one, other = Checksum(), Checksum()
    >>> one.add(b"0123456789"), other.add(b"0123"), other.add(b"456789"), one.seconds() == other.seconds()
    (None, None, None, True)
    """

    def __init__(self) -> None:
        self._sum, self._rest = 0, b""

    def add(self, data: Any) -> None:
        """Add bytes."""
        view = memoryview(data).cast("B")
        missing = -len(self._rest) % 8
        self._rest, view = self._rest + view[:missing].tobytes(), view[missing:]
        if len(self._rest) % 8 == 0:
            whole = len(view) // 8 * 8
            for words in (self._rest, view[:whole]):
                self._sum += int(np.frombuffer(words, "<u8").sum(dtype="<u8")) if words else 0
            self._rest = view[whole:].tobytes()

    def seconds(self) -> int:
        """Return that of what was added."""
        return (self._sum + int.from_bytes(self._rest, "little")) % (1 << 64) % _PRIME


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
        self._checksum = Checksum()
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
        self._checksum.add(view)
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
            os.utime(self._descriptor, (time.time(), self._checksum.seconds()))
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
