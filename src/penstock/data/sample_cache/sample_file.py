"""A file of samples by number, which many processes fill and read at the same time, and any of them may be killed.

    page 0      "penstock samples" | u64 version | u64 places | 32 bytes fingerprint | u32 CRC-32 of all of that
    at 128      u64 end of the content | u32 CRC-32 of it
    at 4096     a table: u64 offset | u64 bytes | u32 CRC-32 of the content | u32 CRC-32 of the three and the place
    then        the content of the samples, one after another

All is little endian. Who adds a sample locks the file (flock, which the kernel releases when a process dies), moves the
end, and unlocks; then it writes the content behind the old end, and then the entry. A process that is killed in between
leaves an empty entry, and room that is not used. Two that add the same sample at the same time use room twice, and one
of their entries stays. Readers take no lock: an entry that is being written fails its CRC and counts as empty. Nothing
is mapped, so that a file that was cut off or a disk that is full is an error and not a SIGBUS. Nothing is ever moved or
removed.
"""

from __future__ import annotations

import os
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from penstock.core.errors import SourceError
from penstock.core.walking import walk
from penstock.data.storage.open_descriptors import OwnedDescriptor

_MAGIC = b"penstock samples"
_VERSION = 3
_HEAD = struct.Struct("<16sQQ32s")
_CRC = struct.Struct("<I")
_END_AT = 128
_END = struct.Struct("<Q")
_TABLE_AT = 4096
_ENTRY = struct.Struct("<QQI")
_ENTRY_NBYTES = _ENTRY.size + _CRC.size

_MOST_PARTS = 1024
"""Of one `pwritev` (IOV_MAX)."""

Entry = tuple[int, int, int]
"""Offset, bytes and CRC-32 of a sample's content."""

_files: weakref.WeakSet[SampleFile] = weakref.WeakSet()


def table_nbytes(places: int) -> int:
    """Return where the content begins."""
    return _TABLE_AT + _ENTRY_NBYTES * places


class SampleFile:
    """One file of samples, for this process and those it forks.

    Args:
        reopen: returns a new descriptor of the file: a lock belongs to whoever opened it, and not to a process.
        base: where page 0 is.
        places: how many samples there may be.
        name: for messages.
    """

    limit_nbytes = 0
    """Of the content of all samples, for what this process adds."""

    def __init__(self, reopen: Callable[[], int], base: int, places: int, name: str) -> None:
        self._reopen = reopen
        self._base = base
        self._places = places
        self._content_at = table_nbytes(places)
        self.name = name
        self._lock = threading.Lock()
        self._opened: OwnedDescriptor | None = None
        self._inherited: OwnedDescriptor | None = None
        _files.add(self)

    def forget(self) -> None:
        """Open the file anew when it is needed: in a forked process, whose parent has the lock of the old one."""
        self._lock = threading.Lock()
        self._inherited = self._opened or self._inherited
        self._opened = None

    # ── page 0 ──────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, fingerprint: bytes) -> None:
        """Make the first page and the table, or check those of a file that exists, with a `fingerprint` of 32 bytes."""
        wanted = _with_crc(_HEAD.pack(_MAGIC, _VERSION, self._places, fingerprint))
        with self._locked() as fd:
            found = os.pread(fd, len(wanted), self._base)
            # A file of zeros as long as the table is one whose maker was killed.
            is_new = self._base > 0 or os.fstat(fd).st_size in (0, self._content_at)
            if is_new and found.strip(b"\0") == b"":
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(fd, self._base, self._content_at)
                self._write_end(fd, self._content_at)
                os.pwrite(fd, wanted, self._base)
                return
            if found != wanted:
                raise SourceError(f"{self.name} {_difference(found, wanted)}; remove the file, or pass another path")
            # After a power failure the end may be an older one than the content that reached the disk.
            if self._read_end(fd) < (size := os.fstat(fd).st_size - self._base):
                self._write_end(fd, size)

    def _read_end(self, fd: int) -> int:
        found = os.pread(fd, _END.size + _CRC.size, self._base + _END_AT)
        if len(found) < _END.size + _CRC.size or _with_crc(found[: _END.size]) != found:
            raise SourceError(f"{self.name} is damaged at byte {self._base + _END_AT}; remove the file")
        return int(_END.unpack_from(found)[0])

    def _write_end(self, fd: int, end: int) -> None:
        os.pwrite(fd, _with_crc(_END.pack(end)), self._base + _END_AT)

    def filled(self) -> tuple[int, int]:
        """Return how many samples it has, and the bytes that they take."""
        with self._locked() as fd:
            end = self._read_end(fd)
        table = os.pread(fd, self._content_at - _TABLE_AT, self._base + _TABLE_AT)
        offsets = np.frombuffer(table, np.uint8).reshape(-1, _ENTRY_NBYTES)[:, :8]
        return int(offsets.any(axis=1).sum()), end - self._content_at

    # ── samples ─────────────────────────────────────────────────────────────────────────────────────────────

    def entry(self, place: int) -> Entry | None:
        """Return where a sample is; None while it is nowhere."""
        found = os.pread(self._descriptor(), _ENTRY_NBYTES, self._entry_at(place))
        if found != _with_crc(found[: _ENTRY.size], place):
            return None
        offset, nbytes, crc = _ENTRY.unpack_from(found)
        return offset, nbytes, crc

    def _entry_at(self, place: int) -> int:
        return self._base + _TABLE_AT + _ENTRY_NBYTES * place

    def read(self, entry: Entry, *, is_checked: bool) -> np.ndarray | None:
        """Return a sample's content (uint8), in its own memory; None if it is damaged, by its CRC if `is_checked`."""
        offset, nbytes, crc = entry
        fd = self._descriptor()
        if nbytes > os.fstat(fd).st_size:  # it was cut off: take no memory for it
            return None
        content = np.empty(nbytes, np.uint8)
        at = 0
        while at < nbytes:
            count = os.preadv(fd, [content[at:].data], self._base + offset + at)
            if not count:
                return None
            at += count
        return None if is_checked and zlib.crc32(content.data) != crc else content

    def add(
        self, place: int, content: Sequence[bytes | memoryview], *, instead_of: Entry | None, has_crc: bool
    ) -> bool:
        """Add a sample; return False, and add nothing, where it does not fit.

        Args:
            place: its number.
            content: its bytes, in parts.
            instead_of: the entry that the place has; None for an empty one. A place that has another by now keeps it.
            has_crc: whether to record its CRC, for `read` to compare.

        Raises:
            OSError: there is no more room on the disk, or it fails.
        """
        nbytes = sum(map(len, content))
        with self._locked() as fd:
            end = self._read_end(fd)
            if end + nbytes > self._content_at + self.limit_nbytes:
                return False
            if self.entry(place) != instead_of:
                return True
            self._write_end(fd, end + nbytes)
        at, stop = self._base + end, self._base + end + nbytes
        at += os.pwritev(fd, content, at) if len(content) <= _MOST_PARTS else 0
        if at < stop:  # a disk that is nearly full, or more than 2 GiB
            left = memoryview(b"".join(content))[at - stop :]
            while left:
                count = os.pwrite(fd, left, at)
                left, at = left[count:], at + count
        crc = 0
        if has_crc:
            for part in content:
                crc = zlib.crc32(part, crc)
        os.pwrite(fd, _with_crc(_ENTRY.pack(end, nbytes, crc), place), self._entry_at(place))
        return True

    # ── the descriptor ──────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _locked(self) -> Iterator[int]:
        import fcntl

        fd = self._descriptor()
        with self._lock:
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                yield fd
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)

    def _descriptor(self) -> int:
        opened = self._opened
        if opened is None:
            with self._lock:
                opened = self._opened
                if opened is None:
                    opened = self._opened = OwnedDescriptor(self._open())
                    self._inherited = None
        return opened.number

    def _open(self) -> int:
        """Return a new descriptor; in a forked process of its parent's file, whatever has its path by now."""
        if self._inherited is None:
            return self._reopen()
        number = self._inherited.number
        with suppress(FileNotFoundError):  # a system without /proc
            return os.open(f"/proc/self/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            found = self._reopen()
        except FileNotFoundError:
            raise self._replaced_error("was removed") from None
        if not os.path.sameopenfile(found, number):
            os.close(found)
            raise self._replaced_error("was replaced by another file")
        return found

    def _replaced_error(self, what: str) -> SourceError:
        return SourceError(
            f"{self.name} {what} since this program opened it, so worker processes cannot read its samples; leave the "
            "file until the program ends, or start it again"
        )


def _with_crc(content: bytes, place: int = 0) -> bytes:
    return content + _CRC.pack(zlib.crc32(content, place & 0xFFFFFFFF))


def _difference(found: bytes, wanted: bytes) -> str:
    """Return in words why a first page is not the wanted one."""
    if not found.startswith(_MAGIC):
        return "is no cache of samples"
    if len(found) < len(wanted) or _with_crc(found[: _HEAD.size]) != found:
        return "is damaged"
    _, version, places, _ = _HEAD.unpack_from(found)
    _, wanted_version, wanted_places, _ = _HEAD.unpack_from(wanted)
    if version != wanted_version:
        return f"is of format {version}, and this penstock has {wanted_version}"
    if places != wanted_places:
        return f"has samples of a dataset of {places}, and this one has {wanted_places}"
    return "has samples of another dataset: of other classes, functions, files or indices"


def _forget_all() -> None:
    for file in walk(_files):
        file.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
