"""Locks on files (flock) that processes which fork can use."""

from __future__ import annotations

import fcntl
import io
import os


class LockedFile(io.FileIO):
    """A file with a shared lock while it is open."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "rb")
        fcntl.flock(self, fcntl.LOCK_SH)
        self._pid = os.getpid()

    def close(self) -> None:
        """Unlock and close the file. Forked children share the lock: it has to be unlocked, or they would keep it."""
        if not self.closed and self._pid == os.getpid():
            fcntl.flock(self, fcntl.LOCK_UN)
        super().close()


def try_lock(descriptor: int, *, waits: bool) -> bool:
    """Lock a file exclusively; return False if another process has the lock and `waits` is false."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock_and_close(descriptor: int) -> None:
    """Unlock and close a file. Closing alone would leave the lock with children forked in the meantime."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_same_file(descriptor: int, path: str) -> bool:
    """Return whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
