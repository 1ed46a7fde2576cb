"""Slabs: shared segments that worker processes write batches to.

The contract (`Slab`) has three backends. `MemfdSlab` is an anonymous file in memory: it has no name, needs nothing
in /dev/shm, takes pages only when they are written, and is gone with its last process, however that dies.
`NamedSlab` is `multiprocessing.shared_memory`, for systems whose kernel or sandbox refuses memfd; its pages are
reserved up front, because running out of /dev/shm later would be a SIGBUS. `PrivateSlab` is ordinary memory for
bodies that live in the training process.

A slab travels as a `Handle`: a descriptor to attach to a message, or a name. Whoever receives one calls `attach`.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Any, Protocol

from penstock.core.errors import TransportError
from penstock.core.units import size_text

PAGE = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class Handle:
    """How another process finds a slab: by `fd` (sent beside the message) or by `name`."""

    nbytes: int
    fd: int | None = None
    name: str | None = None


class Slab(Protocol):
    """A segment of `nbytes` bytes, seen through `memory`.

    Made by the training process, attached once by each worker. `close` lets go of this process's share; memory that
    somebody still views stays mapped until the last view dies.
    """

    nbytes: int
    memory: memoryview
    sparse: bool
    """Whether untouched pages cost nothing, so that room may be promised generously."""

    def handle(self) -> Handle:
        """Return what `attach` needs in another process."""
        ...

    def close(self) -> None:
        """Let go of the segment; its memory returns when nobody views it any more."""
        ...


class PrivateSlab:
    """Memory of this process only, for workers that are threads or the training process itself."""

    sparse = True

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _ask_for_huge_pages(pages)
        self.memory = memoryview(pages)

    def handle(self) -> Handle:
        """Refuse: private memory has no way into another process."""
        raise TransportError("a private slab cannot be shared with another process")

    def close(self) -> None:
        """Drop this process's own view."""
        self.memory = memoryview(b"")


class MemfdSlab:
    """An anonymous shared segment (`memfd_create`, Linux 3.17 and later)."""

    sparse = True

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        self.nbytes = nbytes
        if fd is None:
            fd = os.memfd_create("penstock", os.MFD_CLOEXEC)
            try:
                os.ftruncate(fd, nbytes)
            except OSError:
                os.close(fd)
                raise
        self._fd = fd
        try:
            pages = mmap.mmap(fd, nbytes)
        except OSError:
            self.close()
            raise
        _ask_for_huge_pages(pages)
        self.memory = memoryview(pages)

    def handle(self) -> Handle:
        """Return the descriptor; the message that carries it duplicates it."""
        return Handle(self.nbytes, fd=self._fd)

    def give_away(self) -> Handle:
        """Return a handle whose receiver becomes the owner."""
        return self.handle()

    def close(self) -> None:
        """Close the descriptor and drop this process's own view."""
        self.memory = memoryview(b"")
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class NamedSlab:
    """A segment of `multiprocessing.shared_memory`, its pages reserved when it is made.

    The name is removed by the maker's `close`, or by Python's resource tracker should the maker be killed.
    """

    sparse = False

    def __init__(self, nbytes: int, name: str | None = None, *, own: bool = True) -> None:
        self.nbytes = nbytes
        self._owner = own
        self._segment = _Segment(name, create=name is None, size=nbytes)
        if name is None:
            self._reserve()
        assert self._segment.buf is not None
        self.memory = memoryview(self._segment.buf)

    def _reserve(self) -> None:
        try:
            fd = os.open(f"/dev/shm/{self._segment.name}", os.O_RDWR)
        except OSError:
            return  # not a system that shows its segments as files, so not one whose /dev/shm can be too small
        try:
            os.posix_fallocate(fd, 0, self.nbytes)
        except OSError as error:
            self._segment.close()
            self._segment.unlink()
            raise OSError(error.errno, os.strerror(error.errno or errno.ENOSPC), "/dev/shm") from error
        finally:
            os.close(fd)

    def handle(self) -> Handle:
        """Return the segment's name."""
        return Handle(self.nbytes, name=self._segment.name)

    def give_away(self) -> Handle:
        """Return a handle whose receiver (`attach(..., own=True)`) becomes the owner and removes the name."""
        self._owner = False
        return self.handle()

    def close(self) -> None:
        """Remove the name; the memory stays mapped while anybody views it."""
        self.memory = memoryview(b"")
        segment = self._segment
        if self._owner:
            self._owner = False
            with contextlib.suppress(FileNotFoundError):
                segment.unlink()
        segment.close()


class _Segment(shared_memory.SharedMemory):
    """Shared memory that may be closed while it is viewed: the last view unmaps it."""

    _buf: Any
    _mmap: Any
    _fd: int

    def close(self) -> None:
        """Unmap now, or leave that to the last view; SharedMemory itself raises then, also from its __del__."""
        try:
            super().close()
        except BufferError:
            self._buf = self._mmap = None
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def memfd_works() -> bool:
    """Return whether this kernel and sandbox give out memfds."""
    if not hasattr(os, "memfd_create"):
        return False
    try:
        os.close(os.memfd_create("penstock-probe"))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return True


def create(nbytes: int, *, named: bool = False) -> MemfdSlab | NamedSlab:
    """Make a shared slab of at least `nbytes` bytes.

    Raises:
        TransportError: the system has no room for it, or no descriptor is left.
    """
    nbytes = max(PAGE, -(-nbytes // PAGE) * PAGE)
    try:
        return NamedSlab(nbytes) if named else MemfdSlab(nbytes)
    except OSError as error:
        raise _no_room(nbytes, error) from error


def attach(handle: Handle, *, own: bool = False) -> MemfdSlab | NamedSlab:
    """Open a slab that another process made; takes over `handle.fd`, and with `own` the name."""
    try:
        if handle.name is not None:
            return NamedSlab(handle.nbytes, handle.name, own=own)
        return MemfdSlab(handle.nbytes, handle.fd)
    except OSError as error:
        raise _no_room(handle.nbytes, error) from error


def _no_room(nbytes: int, error: OSError) -> TransportError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "raise the limit with `ulimit -n`, or use fewer workers"
    elif error.errno == errno.EFBIG:
        remedy = "raise the limit on the size of files, which counts for shared memory too, with `ulimit -f`"
    elif error.errno == errno.ENOSPC:
        remedy = "give the container more shared memory (docker run --shm-size), or lower batch_size or ring_bytes"
    else:
        remedy = "lower batch_size, prefetch_factor or ring_bytes"
    return TransportError(f"no shared segment of {size_text(nbytes)} could be made ({error.strerror}); {remedy}")


def _ask_for_huge_pages(pages: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE") and len(pages) >= 2 << 20:
        with contextlib.suppress(OSError):  # a kernel without them says so; ordinary pages do
            pages.madvise(mmap.MADV_HUGEPAGE)
