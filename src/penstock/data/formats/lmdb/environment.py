"""LMDB environments that are read: opened once in a process, however many sources read a file, and never across a fork.

The lmdb package refuses to open a file twice in a process, and a forked process inherits the environment with that
refusal. So sources share what a process has open, and a forked process closes what it inherited before it opens it
anew. Nothing else is closed while it may be in use: an environment ends with the last source or read that holds it.

LMDB's C code trusts the bytes of a file. What is cheap is checked first: the first page of metadata, and that the file
has the pages that the newest one counts. `find_problem` looks at every page, without that C code.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.core.errors import RecordError, SourceError
from penstock.data.optional import need
from penstock.data.storage.open_descriptors import OwnedDescriptor

_META = struct.Struct("=16xII16xI")
"""Of a file's first page: its magic, its version, the bytes of a page."""
_MAGIC = 0xBEEFC0DE
_PAGE_NBYTES = [1 << bits for bits in range(9, 17)]
"""Others have LMDB divide by 0."""
_DATABASES = 64
"""The most databases inside one file that a process reads."""


class Environment:
    """A file that this process has open.

    Raises:
        SourceError: it is no LMDB file, is truncated, or is open in this process by other code.
        ExtraError: the lmdb package is not installed.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._databases: dict[str | None, Any] = {}
        self._lmdb = need("lmdb", "lmdb")
        try:
            self._opened = OwnedDescriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            head = os.read(self._opened.number, _META.size).ljust(_META.size, b"\0")
            magic, _, page_nbytes = _META.unpack(head)
            if magic != _MAGIC or page_nbytes not in _PAGE_NBYTES:
                raise SourceError(
                    f"{path}: it is no LMDB file of a machine with this byte order, or its head is damaged"
                )
            self.lmdb = self._lmdb.open(path, subdir=False, readonly=True, lock=False, max_dbs=_DATABASES)
            needed = (self.lmdb.info()["last_pgno"] + 1) * self.lmdb.stat()["psize"]
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error}") from error
        except self._lmdb.Error as error:
            hint = "; close it there" if "already open" in str(error) else ""
            raise SourceError(f"{path} cannot be read by LMDB: {str(error).rstrip('.')}{hint}") from error
        self.nbytes = os.fstat(self._opened.number).st_size
        # Pages that were freed before they were ever written are missing in sound files, too.
        if self.nbytes < needed and (problem := find_problem(path)):
            self.lmdb.close()  # the error holds it, and it could not be opened a second time
            raise SourceError(f"{path} is truncated: it counts {needed} bytes, and has {self.nbytes}; {problem}")

    @contextlib.contextmanager
    def reading(self, database: str | None, *, buffers: bool = False, key: bytes = b"") -> Iterator[Any]:
        """Read in a transaction of a database inside the file; None is the file's own. `buffers` gives views.

        Raises:
            RecordError: `key`, or one near it, cannot be read.
            SourceError: the database cannot be read, or the file has become shorter, and to read it would end the
                process.
        """
        nbytes = os.fstat(self._opened.number).st_size
        if nbytes < self.nbytes:
            raise SourceError(f"{self.path} is truncated: it had {self.nbytes} bytes when it was opened, now {nbytes}")
        try:
            with self.lmdb.begin(self.database(database), buffers=buffers) as transaction:
                yield transaction
        except self._lmdb.Error as error:
            if key:
                raise RecordError(self.path, -1, key, str(error)) from error
            raise SourceError(f"{self.path} cannot be read by LMDB: {error}") from error

    def database(self, name: str | None) -> Any:
        """Return the package's handle of a database inside the file.

        Raises:
            SourceError: there is none of this name, or it has several values for a key.
        """
        if (known := self._databases.get(name)) is not None:
            return known
        try:
            with _lock:
                found = self.lmdb.open_db(None if name is None else name.encode(), create=False)
        except (self._lmdb.NotFoundError, self._lmdb.IncompatibleError) as error:
            there = ", ".join(self.database_names())[:200] or "none"
            raise SourceError(f"{self.path}: it has no database {name!r}; it has {there}") from error
        if found.flags()["dupsort"]:
            raise SourceError(
                f"{self.path}: it has several values for a key; which of them belong together, nobody knows here"
            )
        self._databases[name] = found
        return found

    def database_names(self, among: Iterable[bytes] | None = None) -> list[str]:
        """Return the names of the databases inside the file, or of those that are among these keys of it."""
        found = []
        with self.lmdb.begin() as reading:
            for key in reading.cursor().iternext(values=False) if among is None else among:
                with contextlib.suppress(self._lmdb.Error):  # an entry with a value
                    self.lmdb.open_db(key, reading, create=False)
                    found.append(key.decode("utf-8", "replace"))
                if len(found) == _DATABASES:
                    break
        return found


def find_problem(path: str) -> str:
    """Return what the package's verifier finds wrong with a file, all of which it reads; "" if it is sound."""
    need("lmdb", "lmdb")
    try:
        from lmdb.verify import VerifyError, verify
    except ImportError:
        return "only lmdb 3.0 and later can check such a file: pip install --upgrade lmdb"
    try:
        return next(iter(verify(path, subdir=False)), "")  # type: ignore[no-untyped-call]
    except (VerifyError, OSError) as error:
        return str(error)


def open_environment(path: str) -> Environment:
    """Return what this process has open of a file, or open it.

    Raises:
        SourceError, ExtraError: as `Environment` does.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
    key = status.st_dev, status.st_ino
    with _lock:
        found = _opened.get(key)
        if found is None:
            found = _opened[key] = Environment(path)
        return found


_lock = threading.RLock()
_opened: weakref.WeakValueDictionary[tuple[int, int], Environment] = weakref.WeakValueDictionary()


def _close_inherited() -> None:
    global _lock
    _lock = threading.RLock()
    for environment in list(_opened.values()):
        environment.lmdb.close()
    _opened.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_close_inherited)
