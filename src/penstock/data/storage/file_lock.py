"""Locks on files (flock) that processes which fork can use. Windows has none: there the first lock is refused."""

from __future__ import annotations

import io
import os
from types import ModuleType

from penstock.core.errors import SourceError
from penstock.core.private_files import open_file


class LockedFile(io.FileIO):
    """A file of this user's alone, with a shared lock while it is open."""

    def __init__(self, path: str) -> None:
        super().__init__(open_file(path, os.O_RDONLY), "rb")
        fcntl = _fcntl()
        fcntl.flock(self, fcntl.LOCK_SH)
        self._pid = os.getpid()

    def close(self) -> None:
        """Unlock and close the file. Forked children share the lock: it has to be unlocked, or they would keep it."""
        if not self.closed and self._pid == os.getpid():
            unlock(self.fileno())
        super().close()


def try_lock(descriptor: int, *, waits: bool) -> bool:
    """Lock a file exclusively; return False if another process has the lock and `waits` is false."""
    fcntl = _fcntl()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock_and_close(descriptor: int) -> None:
    """Unlock and close a file. Closing alone would leave the lock with children forked in the meantime."""
    unlock(descriptor)
    os.close(descriptor)


def unlock(descriptor: int) -> None:
    """Unlock a file."""
    fcntl = _fcntl()
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def _fcntl() -> ModuleType:
    try:
        import fcntl
    except ImportError as error:
        raise SourceError(
            "this system has no flock: the cache of remote files and conversions need Linux or macOS"
        ) from error
    return fcntl


def is_same_file(descriptor: int, path: str) -> bool:
    """Return whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
