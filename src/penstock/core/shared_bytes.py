"""Bytes in a shared segment that any process of this machine may map: pickled, they are only a way to find them.

    with memfd     the pickle names a process and its descriptor; the one that unpickles opens /proc/<pid>/fd/<fd>
    without        the pickle names the segment

The segment begins with a random token, which is compared when it is mapped: descriptors and pids are used again. It is
gone with the last process that has mapped it, however that ends.
"""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Callable
from typing import Any

from penstock.core.errors import TransportError
from penstock.core.shared_segment import Handle, MemfdSegment, NamedSegment, attach, create, memfd_works

HEAD_NBYTES = 64
"""The token, and room that keeps what follows on a cache line of its own."""

_TOKEN_NBYTES = 16


class SharedBytes:
    """Shared memory, seen through `memory`.

    Args:
        nbytes: how many, all zero.

    Raises:
        TransportError: the system has no memory for it, or no descriptor is left.

    >>> import pickle
    >>> one = SharedBytes(8)
    >>> other = pickle.loads(pickle.dumps(one))
    >>> one.memory[0] = 7
    >>> other.memory[0]
    7
    """

    def __init__(self, nbytes: int) -> None:
        segment = create(HEAD_NBYTES + nbytes, named=not memfd_works())
        segment.memory[:_TOKEN_NBYTES] = os.urandom(_TOKEN_NBYTES)
        self._adopt(segment, nbytes)

    def _adopt(self, segment: MemfdSegment | NamedSegment, nbytes: int) -> None:
        self._segment = segment
        self._token = bytes(segment.memory[:_TOKEN_NBYTES])
        self.memory = segment.memory[HEAD_NBYTES : HEAD_NBYTES + nbytes]
        weakref.finalize(self, _close, segment, os.getpid())

    def protect(self, *, was_filled_here: bool = True) -> None:
        """Map it read-only from now on, here and where it is unpickled.

        A view of it cannot be made writable again (NumPy's `flags.writeable = True`), and C code that writes to it
        ends in a SIGSEGV.

        Args:
            was_filled_here: whether this process has written it.
        """
        self._segment.map_read_only(at_once=was_filled_here)
        self.memory = self._segment.memory[HEAD_NBYTES : HEAD_NBYTES + len(self.memory)]

    def reopen(self) -> int:
        """Return a new descriptor of the memory, which begins at `HEAD_NBYTES` of that file; only with memfd.

        It is what a lock on the memory belongs to. The caller closes it.
        """
        return os.open(f"/proc/self/fd/{self._segment.handle().fd}", os.O_RDWR | os.O_CLOEXEC)

    def __reduce__(self) -> Any:
        handle = self._segment.handle()
        size, is_protected = len(self.memory), self.memory.readonly
        return _attached, (os.getpid(), handle.fd, handle.name, handle.nbytes, size, self._token, is_protected)

    def __copy__(self) -> SharedBytes:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedBytes:
        return self


def attached_or_new(make: Callable[..., Any], attach: Any, arguments: tuple[Any, ...], *values: Any) -> Any:
    """Return `make(*values, memory)`, of what a `SharedBytes` has pickled as `attach` and `arguments`.

    Without the memory where it is gone or on another machine: what is made then is nobody else's.
    """
    try:
        return make(*values, attach(*arguments))
    except TransportError:
        return make(*values)


def _close(segment: MemfdSegment | NamedSegment, owner: int) -> None:
    if os.getpid() != owner:  # a forked process must not remove the name
        segment.give_away()
    segment.close()


def _attached(
    pid: int, fd: int | None, name: str | None, nbytes: int, size: int, token: bytes, is_protected: bool
) -> SharedBytes:
    """Return the bytes that another process has pickled (or this one).

    Raises:
        TransportError: they are gone, or on another machine.
    """
    try:
        found = Handle(nbytes, _open(pid, fd, nbytes)) if fd is not None else Handle(nbytes, name=name)
        segment = attach(found)
    except (OSError, TransportError) as error:
        raise _gone_error(pid, error) from error
    if segment.memory[:_TOKEN_NBYTES] != token:
        segment.close()
        raise _gone_error(pid, "something else is there now")
    shared = SharedBytes.__new__(SharedBytes)
    shared._adopt(segment, size)
    if is_protected:
        shared.protect(was_filled_here=False)
    return shared


def _open(pid: int, fd: int, nbytes: int) -> int:
    path = f"/proc/{pid}/fd/{fd}"
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:  # opening a pipe, say, would wait
        raise FileNotFoundError(f"{path} is something else now")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _gone_error(pid: int, reason: object) -> TransportError:
    return TransportError(
        f"shared memory that process {pid} has pickled cannot be mapped ({reason}): a pickle of it is good only on the "
        "same machine, for the same user and while that process has it; make it anew where it is needed"
    )
