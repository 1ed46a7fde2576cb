"""Copies of remote files on a disk, shared by all workers, ranks and jobs that name the same folder.

    KEY-NAME              a copy, whole; KEY is a hash of the URL, the size and the version, so that a file that changes
                          at its origin is another one here
    KEY-NAME.part         one being made, locked (flock) by who makes it; others wait
    KEY-NAME.read.part    one that is made while a stream reads the file; others read past the cache
    lock                  taken while room is made
    users/                which copies are needed by processes that were given their paths, see `cache_users`

A process may be killed at any moment: the kernel lets go of its locks, a copy gets its name only when it is whole and
on the disk, and the next process that makes a copy removes every .part that nobody has locked.

The folder holds at most `nbytes`, copies being made among them. For a new one the least recently used are removed, but
for those that are being read through `Cache.open`, which are locked (shared), and those whose path a living process was
given by `Cache.path`. All processes belong to one user. The file system must have locks: local ones do, Lustre with
-o flock, NFS from version 4 on.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from penstock.core.errors import SourceError
from penstock.feed.sources import cache_users as users

_PART = ".part"
_READ = ".read"
_LOCK = "lock"
_LONGEST_NAME = 100


def default_folder() -> str:
    """Return where copies lie that nobody chose a folder for."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "penstock", "remote")


def name_of(url: str, nbytes: int, version: str) -> str:
    """Return the name of a copy. Its end is that of the file, as formats are told by it.

    >>> name_of("s3://bucket/a/train-000.tar", 100, "e")
    '6805cb28ee2133784f5e4fa5-train-000.tar'
    """
    digest = hashlib.sha256(f"{url}\0{nbytes}\0{version}".encode()).hexdigest()[:24]
    last = url.partition("://")[2].partition("?")[0].rstrip("/").rpartition("/")[2]
    return f"{digest}-{re.sub(r'[^A-Za-z0-9._-]', '_', last)[-_LONGEST_NAME:]}"


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder of copies. Holds nothing open."""

    folder: str
    nbytes: int

    def open(self, name: str, nbytes: int) -> BinaryIO | None:
        """Open a copy, and keep it from being removed until it is closed; None if there is none."""
        path = os.path.join(self.folder, name)
        with self._told(name, nbytes):
            try:
                file = _Locked(path)
            except FileNotFoundError:
                return None
            if os.fstat(file.fileno()).st_size != nbytes:
                file.close()
                return None
            with suppress(PermissionError):  # another user's
                os.utime(file.fileno())
        return io.BufferedReader(file)

    def path(self, name: str, nbytes: int, write: Callable[[Filling], None]) -> str:
        """Return the path of a copy, made by `write` if there is none. One process makes it, others wait.

        The copy stays as long as this process lives.

        Raises:
            SourceError: there is no room for it.
        """
        while True:
            file = self.open(name, nbytes)
            if file is not None:
                with file, self._told(name, nbytes):  # who removes a copy looks at the notes when nobody has it locked
                    users.note(self.folder, name)
                    path = os.path.join(self.folder, name)
                    if _is_at(file.fileno(), path):
                        return path
            filling = self.begin(name, nbytes)
            if filling is not None:
                with filling:
                    write(filling)
                    filling.finish()

    def begin(self, name: str, nbytes: int, *, in_passing: bool = False) -> Filling | None:
        """Begin a copy; None if there is one now.

        Args:
            name: its name.
            nbytes: its size.
            in_passing: it is made while somebody reads the file, at the pace of that. Nobody waits for such a copy, and
                None is also returned when there is one under way.

        Raises:
            SourceError: there is no room for it.
        """
        if nbytes > self.nbytes:
            raise SourceError(
                f"a copy of {name} needs {nbytes} bytes, and the cache {self.folder} may hold {self.nbytes}; raise "
                "cache_nbytes"
            )
        path = os.path.join(self.folder, name)
        part_path = path + (_READ if in_passing else "") + _PART
        with self._told(name, nbytes):
            os.makedirs(self.folder, exist_ok=True)
            while not _is_whole(path, nbytes):
                part = os.open(part_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                if not _locked(part, waits=not in_passing):
                    os.close(part)
                    return None
                if not _is_at(part, part_path):  # who made it, or cleaned up, was faster
                    _let_go(part)
                    continue
                filling = Filling(part, part_path, path, nbytes)
                try:
                    if _is_whole(path, nbytes):
                        filling.close()
                        continue
                    os.ftruncate(part, 0)
                    self._make_room(name, nbytes, part)
                except BaseException:
                    filling.close()
                    raise
                return filling
        return None

    def _make_room(self, name: str, nbytes: int, part: int) -> None:
        """Remove what nobody needs until the new copy fits, and take its room."""
        with open(os.path.join(self.folder, _LOCK), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self._clean_up()
                copies = self._copies()
                excess = sum(size for _, size, _ in copies) + nbytes - self.nbytes
                for _, size, path in sorted(copies):
                    if excess <= 0:
                        break
                    if not path.endswith(_PART) and _remove_unneeded(path):
                        excess -= size
                if excess > 0:
                    raise SourceError(
                        f"a copy of {name} needs {nbytes} bytes, and the cache {self.folder}, which may hold "
                        f"{self.nbytes}, is full of files that are in use; raise cache_nbytes by {excess} or more"
                    )
                if nbytes > shutil.disk_usage(self.folder).free:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.ftruncate(part, nbytes)  # so that others see the room as taken
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)

    def _clean_up(self) -> None:
        users.clean_up(self.folder)
        for path in self._paths():
            if path.endswith(_PART):
                _remove_unneeded(path)

    def _copies(self) -> list[tuple[float, int, str]]:
        """Return when each was last used, its size and its path."""
        found = []
        for path in self._paths():
            with suppress(FileNotFoundError):
                status = os.stat(path, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found.append((status.st_mtime, status.st_size, path))
        return found

    def _paths(self) -> list[str]:
        names = os.listdir(self.folder)
        return [os.path.join(self.folder, name) for name in names if name not in (_LOCK, users.FOLDER)]

    @contextmanager
    def _told(self, name: str, nbytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _disk_error(self.folder, name, nbytes, error) from error


class Filling:
    """A copy that is being made, by this process. `finish` gives it its name; without that `close` removes it."""

    def __init__(self, part: int, part_path: str, path: str, nbytes: int) -> None:
        self.written = 0
        self.nbytes = nbytes
        self._part = part
        self._part_path = part_path
        self._path = path
        self._pid = os.getpid()

    def __enter__(self) -> Filling:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether it can be written to: it has neither been closed, nor come through a fork."""
        return self._part >= 0 and self._pid == os.getpid()

    def write(self, data: Any) -> None:
        """Add bytes.

        Raises:
            SourceError: the disk is full.
        """
        view = memoryview(data)
        try:
            while len(view):
                count = os.pwrite(self._part, view, self.written)
                self.written += count
                view = view[count:]
        except OSError as error:
            folder, name = os.path.split(self._path)
            raise _disk_error(folder, name, self.nbytes, error) from error

    def finish(self) -> None:
        """Give the copy its name, once it is on the disk.

        Raises:
            SourceError: it is not whole, or could not be written.
        """
        folder, name = os.path.split(self._path)
        if self.written != self.nbytes:
            raise SourceError(f"a copy of {name} has {self.written} bytes instead of {self.nbytes}")
        try:
            os.fsync(self._part)
            os.rename(self._part_path, self._path)
        except OSError as error:
            raise _disk_error(folder, name, self.nbytes, error) from error
        self._end()

    def close(self) -> None:
        """Remove what is not finished."""
        if self.is_open:
            with suppress(FileNotFoundError):
                os.unlink(self._part_path)
            self._end()

    def _end(self) -> None:
        part, self._part = self._part, -1
        _let_go(part)


class _Locked(io.FileIO):
    """A file that is not removed from the cache while it is open."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "rb")
        fcntl.flock(self, fcntl.LOCK_SH)
        self._pid = os.getpid()

    def close(self) -> None:
        """Let go of it. A lock is one for all who inherited it: said aloud, it ends for children too."""
        if not self.closed and self._pid == os.getpid():
            fcntl.flock(self, fcntl.LOCK_UN)
        super().close()


def _locked(part: int, *, waits: bool) -> bool:
    try:
        fcntl.flock(part, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _let_go(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked meanwhile has the descriptor too
    os.close(descriptor)


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _is_whole(path: str, nbytes: int) -> bool:
    try:
        return os.stat(path).st_size == nbytes
    except FileNotFoundError:
        return False


def _remove_unneeded(path: str) -> bool:
    """Remove a file unless somebody has it locked, or needs it; say whether its room is free."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if not _locked(descriptor, waits=False):
            return False
        folder, name = os.path.split(path)
        if name in users.needed(folder):
            return False
        if _is_at(descriptor, path):
            os.unlink(path)
        return True
    finally:
        _let_go(descriptor)


def _disk_error(folder: str, name: str, nbytes: int, error: OSError) -> SourceError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(folder).free
        return SourceError(
            f"a copy of {name} needs {nbytes} bytes, and the disk of {folder} has {free} free; free some, or name "
            "a folder on another one: cache="
        )
    return SourceError(f"a copy of {name} cannot be made in {folder}: {error}; name another folder: cache=")
