"""Memory segments that workers write batches to.

The protocol `SharedSegment` has three backends. `MemfdSegment` is an anonymous file in memory: it has no name, needs
nothing in /dev/shm, takes pages only when they are written, and is gone with its last process, however that dies.
`NamedSegment` is `multiprocessing.shared_memory`, for what `penstock.shared` holds on systems without memfd; its pages
are reserved up front, because running out of /dev/shm later would be a SIGBUS. `PrivateSegment` is ordinary memory, for
workers that are threads and for batches made in the training process.

A segment travels as a `Handle`: a descriptor to attach to a message, or a name. The receiver calls `attach`.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
from dataclasses import dataclass
from multiprocessing import resource_tracker, shared_memory
from typing import Any, Protocol

from penstock.core.errors import TransportError
from penstock.core.units import size_text

PAGE = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class Handle:
    """How another process finds a segment: by `fd` (sent beside the message) or by `name`."""

    nbytes: int
    fd: int | None = None
    name: str | None = None


class SharedSegment(Protocol):
    """A segment of `nbytes` bytes, seen through `memory`.

    The training process makes it, and each worker attaches it once. `close` drops this process's share; memory that is
    still viewed stays mapped until the last view dies.
    """

    nbytes: int
    memory: memoryview
    shared: bool
    """Whether processes that are forked from this one see what is written here afterwards."""

    def handle(self) -> Handle:
        """Return what `attach` needs in another process."""
        ...

    def close(self) -> None:
        """Drop this process's share; the memory is returned when its last view has died."""
        ...


class PrivateSegment:
    """Memory of this process only, for workers that are threads or the training process itself.

    Raises:
        TransportError: the system has no memory for it.
    """

    shared = False

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # Windows' mmap has no flags, and its memory without a name is private.
        is_posix = hasattr(mmap, "MAP_PRIVATE")
        try:
            pages = mmap.mmap(-1, nbytes, **({"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if is_posix else {}))
        except OSError as error:
            raise _no_segment_error(nbytes, error) from error
        _ask_for_huge_pages(pages)
        self.memory = memoryview(pages)

    def handle(self) -> Handle:
        """Refuse: private memory has no way into another process."""
        raise TransportError("a private segment cannot be shared with another process")

    def close(self) -> None:
        """Drop this process's own view."""
        self.memory = memoryview(b"")


class MemfdSegment:
    """An anonymous shared segment (`memfd_create`, Linux 3.17 and later)."""

    shared = True

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

    def map_read_only(self, *, at_once: bool) -> None:
        """Map it anew, without the right to write; the old mapping goes with its last view.

        Args:
            at_once: map its pages now, not each when it is read: those of a mapping that goes stay counted as shared
                in processes that are forked from this one, and not as their own.
        """
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if at_once else 0)
        try:
            pages = mmap.mmap(self._fd, self.nbytes, flags=flags, prot=mmap.PROT_READ)
        except OSError as error:
            raise _no_segment_error(self.nbytes, error) from error
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


class NamedSegment:
    """A segment of `multiprocessing.shared_memory`, its pages reserved when it is made.

    The name is removed by the owner's `close`, or by Python's resource tracker if the owner is killed.
    """

    shared = True

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
            return  # segments are no files here, so there is no /dev/shm that could be too small
        try:
            os.posix_fallocate(fd, 0, self.nbytes)
        except OSError as error:
            self._segment.close()
            self._segment.unlink()
            raise OSError(error.errno, os.strerror(error.errno or errno.ENOSPC), "/dev/shm") from error
        finally:
            os.close(fd)

    def map_read_only(self, *, at_once: bool) -> None:
        """View it read-only: `multiprocessing.shared_memory` has no other mapping."""
        self.memory = self.memory.toreadonly()

    def handle(self) -> Handle:
        """Return the segment's name."""
        return Handle(self.nbytes, name=self._segment.name)

    def give_away(self) -> Handle:
        """Return a handle whose receiver (`attach(..., own=True)`) becomes the owner and removes the name."""
        self._owner = False
        return self.handle()

    def close(self) -> None:
        """Remove the name; the memory stays mapped while it is viewed."""
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

    def unlink(self) -> None:
        """Remove the name; SharedMemory itself unregisters it also where it failed before it was registered."""
        if self._mmap is None:
            resource_tracker.register(self._name, "shared_memory")  # type: ignore[attr-defined]
        super().unlink()


def memfd_works() -> bool:
    """Return whether this kernel and sandbox allow memfds."""
    if not hasattr(os, "memfd_create"):
        return False
    try:
        os.close(os.memfd_create("penstock-probe"))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return True


def create(nbytes: int, *, named: bool = False) -> MemfdSegment | NamedSegment:
    """Make a shared segment of at least `nbytes` bytes.

    Raises:
        TransportError: the system has no memory for it, or no descriptor is left.
    """
    nbytes = max(PAGE, -(-nbytes // PAGE) * PAGE)
    try:
        if nbytes > sys.maxsize:
            raise OSError(errno.ENOMEM, "no file and no address is so large")
        return NamedSegment(nbytes) if named else MemfdSegment(nbytes)
    except OSError as error:
        raise _no_segment_error(nbytes, error) from error


def attach(handle: Handle) -> MemfdSegment | NamedSegment:
    """Open a segment that another process made; takes over `handle.fd`."""
    try:
        if handle.name is not None:
            return NamedSegment(handle.nbytes, handle.name, own=False)
        return MemfdSegment(handle.nbytes, handle.fd)
    except OSError as error:
        raise _no_segment_error(handle.nbytes, error) from error


def _no_segment_error(nbytes: int, error: OSError) -> TransportError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "raise the limit with `ulimit -n`, or use fewer workers"
    elif error.errno == errno.EFBIG:
        remedy = "raise the limit on the size of files, which counts for shared memory too, with `ulimit -f`"
    elif error.errno == errno.ENOSPC:
        remedy = "give the container more shared memory (docker run --shm-size), or lower batch_size or ring_bytes"
    else:
        remedy = "lower batch_size, prefetch_factor or ring_bytes"
    return TransportError(f"no segment of {size_text(nbytes)} could be made ({error.strerror}); {remedy}")


def _ask_for_huge_pages(pages: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE") and len(pages) >= 2 << 20:
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses; ordinary pages are enough
            pages.madvise(mmap.MADV_HUGEPAGE)
