"""A folder of copies of remote files, shared by all workers, ranks and jobs that use the same folder.

    KEY-NAME              a complete copy; KEY is a hash of the URL, the size and the version, which has a mark of the
                          server, so that a file that changes at its origin or is another server's gets another copy.
                          The time of its last change is its checksum, that of its last access when it was used
    KEY-NAME.part         a copy being made, locked (flock) by the process that makes it; others wait
    KEY-NAME.read.part    a copy made while a stream reads the file; others read past the cache
    lock                  held while room is made; its 8 bytes are a number of bytes that the copies do not exceed
    leases/               which copies processes need that were given their paths, see `cache_leases`

A process may be killed at any moment. The kernel releases its locks, a copy is renamed only when it is complete and
on the disk, and the next process that makes a copy removes every KEY-NAME.part that nobody has locked. Files with other
names are somebody else's.

The folder holds at most `nbytes`, unfinished copies included. Each copy is added to the number in the lock; the files
are listed when that exceeds `nbytes`, and before a process's first copy. To make room, the least recently used copies
are removed, except those that are open through `DiskCache.open`, which are locked (shared), and those whose path
`DiskCache.path` gave to a living process. The folder and its files are this user's alone, see `private_files`: copies
of private files stay private, and what another user has put there is refused. The file system must support locks:
local ones do, Lustre with -o flock, NFS from version 4. A copy is compared with its checksum when a process first
opens it that has not made it; forked ones know what their parent has compared. One that is damaged is removed, and
fetched anew.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import shutil
import stat
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import BinaryIO

from penstock.core.errors import SourceError
from penstock.core.private_files import check_folder, make_folder, open_file
from penstock.data.storage.backend import FileVersion
from penstock.data.storage.cache import cache_leases
from penstock.data.storage.cache.partial_copy import Checksum, PartialCopy, translate_errors
from penstock.data.storage.file_lock import LockedFile, is_same_file, try_lock, unlock, unlock_and_close

_PARTIAL = ".part"
_READING = ".read"
_LOCK = "lock"
_COPY = re.compile(r"[0-9a-f]{24}-")
"""How the name of a copy begins: what else lies in the folder is the user's, and neither counted nor removed."""
_MAX_NAME = 100
_TO_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT
_SPARE = 32
"""A full cache makes room for this part of it at once: to list its files for each copy takes longer than the copy."""

_READ_NBYTES = 256 << 10

_checked: set[int] = set()
"""Hashes of the folders and copies that this process, or one that it was forked from, has looked at: whose they are,
and whether intact. To read a copy for that takes a third of what it takes to read its samples."""

_listed: set[tuple[int, str]] = set()
"""Processes and their folders whose files they have listed."""


def user_folder(name: str) -> str:
    """Return a folder in the user's cache: "remote" for copies without another folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "penstock", name)


def copy_name(url: str, version: FileVersion) -> str:
    """Return the name of a copy. It ends as the file's name does, since formats are recognized by it.

    >>> copy_name("s3://bucket/a/train-000.tar", FileVersion(100, "e"))
    '6805cb28ee2133784f5e4fa5-train-000.tar'
    """
    digest = hashlib.sha256(f"{url}\0{version.nbytes}\0{version.version}".encode()).hexdigest()[:24]
    last = url.partition("://")[2].partition("?")[0].rstrip("/").rpartition("/")[2]
    return f"{digest}-{re.sub(r'[^A-Za-z0-9._-]', '_', last)[-_MAX_NAME:]}"


@dataclass(frozen=True, slots=True)
class DiskCache:
    """A folder of copies. Holds nothing open."""

    folder: str
    nbytes: int
    opening: str = ""
    """Which opening it is for: copies of files without a version are no other's."""

    def copy_name(self, url: str, version: FileVersion) -> str:
        """Return the name of a copy, which is this opening's alone where nothing says which version it is of."""
        return copy_name(url, version if version.version else replace(version, version=f"opening {self.opening}"))

    def has(self, name: str, nbytes: int) -> bool:
        """Return whether there is a complete copy, which another process may remove."""
        return _is_complete(os.path.join(self.folder, name), nbytes)

    def open(self, name: str, nbytes: int) -> BinaryIO | None:
        """Open a copy, and prevent its removal until it is closed; None if there is none."""
        path = os.path.join(self.folder, name)
        with translate_errors(path, nbytes):
            try:
                place = hash(self.folder)
                if place not in _checked:
                    check_folder(self.folder)
                    _checked.add(place)
                file = LockedFile(path)
            except FileNotFoundError:
                return None
            status = os.fstat(file.fileno())
            if status.st_size != nbytes:
                file.close()
                return None
            place = hash(path)
            if place not in _checked and not _is_intact(file.fileno(), int(status.st_mtime)):
                file.close()
                with suppress(FileNotFoundError):
                    os.unlink(path)
                warnings.warn(f"{path}, a copy of a remote file, was damaged; it is fetched anew", stacklevel=3)
                return None
            _checked.add(place)
            os.utime(file.fileno(), ns=(time.time_ns(), status.st_mtime_ns))
        return io.BufferedReader(file)

    def path(self, name: str, nbytes: int, write: Callable[[PartialCopy], None]) -> str:
        """Return the path of a copy, made by `write` if there is none. One process makes it, others wait.

        The copy stays as long as this process lives.
        """
        path = os.path.join(self.folder, name)
        while True:
            file = self.open(name, nbytes)
            if file is not None:
                # The lease is added under the file's lock: a process that removes a copy reads the leases when it has
                # the lock.
                with file, translate_errors(path, nbytes):
                    cache_leases.add(self.folder, name)
                    if is_same_file(file.fileno(), path):
                        return path
            copy = self.begin_copy(name, nbytes)
            if copy is not None:
                with copy:
                    write(copy)
                    copy.finish()
                _checked.add(hash(path))

    def begin_copy(self, name: str, nbytes: int, *, while_reading: bool = False) -> PartialCopy | None:
        """Begin a copy; None if there is a complete one.

        With `while_reading` it is made while a stream reads the file, at the stream's pace. Nobody waits for such a
        copy, and None is also returned when another process is making it.
        """
        if nbytes > self.nbytes:
            raise SourceError(
                f"a copy of {name} needs {nbytes} bytes, and the cache {self.folder} may hold {self.nbytes}; raise "
                "cache_nbytes"
            )
        path = os.path.join(self.folder, name)
        partial_path = path + (_READING if while_reading else "") + _PARTIAL
        with translate_errors(path, nbytes):
            make_folder(self.folder)
            while not _is_complete(path, nbytes):
                descriptor = open_file(partial_path, os.O_RDWR | os.O_CREAT)
                if not try_lock(descriptor, waits=not while_reading):
                    os.close(descriptor)
                    return None
                if not is_same_file(descriptor, partial_path):
                    # While this process waited for the lock, another one finished the copy or removed it.
                    unlock_and_close(descriptor)
                    continue
                copy = PartialCopy(descriptor, partial_path, path, nbytes)
                if self._reserve(copy, descriptor, path):
                    return copy
        return None

    def _reserve(self, copy: PartialCopy, descriptor: int, path: str) -> bool:
        """Take room for a copy whose lock is held; False, and `copy` closed, if there is a complete copy by now."""
        try:
            if _is_complete(path, copy.nbytes):
                copy.close()
                return False
            os.ftruncate(descriptor, 0)
            self._make_room(os.path.basename(path), copy.nbytes, descriptor)
        except BaseException:
            copy.close()
            raise
        return True

    def _make_room(self, name: str, nbytes: int, descriptor: int) -> None:
        """Remove unused copies until the new one fits, and take its room."""
        with open(open_file(os.path.join(self.folder, _LOCK), _TO_APPEND), "a+b", buffering=0) as lock:
            try_lock(lock.fileno(), waits=True)
            try:
                counted = os.pread(lock.fileno(), 8, 0)
                used_nbytes = int.from_bytes(counted, "little")
                place = os.getpid(), self.folder
                if place not in _listed or len(counted) != 8 or used_nbytes + nbytes > self.nbytes:
                    used_nbytes = self._remove_excess(name, nbytes)
                    _listed.add(place)
                if nbytes > shutil.disk_usage(self.folder).free:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                lock.truncate(0)
                lock.write((used_nbytes + nbytes).to_bytes(8, "little"))
                os.ftruncate(descriptor, nbytes)  # other processes count the room as taken
            finally:
                unlock(lock.fileno())

    def _remove_excess(self, name: str, nbytes: int) -> int:
        """Remove unused copies until the new one fits, and more for those after it; return the bytes of the rest."""
        cache_leases.remove_expired(self.folder)
        for path in self._paths():
            if path.endswith(_PARTIAL):
                _remove_if_unused(path)
        copies = self._copies()
        used_nbytes = sum(size for _, size, _ in copies)
        excess = used_nbytes + nbytes - self.nbytes
        wanted = excess + self.nbytes // _SPARE if excess > 0 else 0
        for _, size, path in sorted(copies):
            if wanted <= 0:
                break
            if not path.endswith(_PARTIAL) and _remove_if_unused(path):
                wanted, excess, used_nbytes = wanted - size, excess - size, used_nbytes - size
        if excess > 0:
            raise SourceError(
                f"a copy of {name} needs {nbytes} bytes, and the cache {self.folder}, which may hold {self.nbytes}, is "
                f"full of files that are in use; raise cache_nbytes by {excess} or more"
            )
        return used_nbytes

    def _copies(self) -> list[tuple[float, int, str]]:
        """Return each copy's time of last use, size and path."""
        found = []
        for path in self._paths():
            with suppress(FileNotFoundError):
                status = os.stat(path, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found.append((status.st_atime, status.st_size, path))
        return found

    def _paths(self) -> list[str]:
        return [os.path.join(self.folder, name) for name in os.listdir(self.folder) if _COPY.match(name)]


def _is_complete(path: str, nbytes: int) -> bool:
    try:
        return os.stat(path).st_size == nbytes
    except FileNotFoundError:
        return False


def _is_intact(descriptor: int, seconds: int) -> bool:
    checksum, at = Checksum(), 0
    while data := os.pread(descriptor, _READ_NBYTES, at):
        checksum.add(data)
        at += len(data)
    return checksum.seconds() == seconds


def _remove_if_unused(path: str) -> bool:
    """Remove a file unless a process has locked it or needs it; return whether its room is free."""
    try:
        descriptor = open_file(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    except SourceError:  # somebody else's
        return False
    try:
        if not try_lock(descriptor, waits=False):
            return False
        folder, name = os.path.split(path)
        if name in cache_leases.leased_names(folder):
            return False
        if is_same_file(descriptor, path):
            os.unlink(path)
        return True
    finally:
        unlock_and_close(descriptor)
