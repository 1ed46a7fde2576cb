"""Channels: whole messages over a local socket, with descriptors and with no lock that a dying process could keep.

A channel is a pair of `SOCK_SEQPACKET` sockets. The kernel delivers each message whole to exactly one receiver, so
several workers can take from one end and several can write to the other; a process that is killed at any point
leaves neither half a message nor a held lock, which is how `multiprocessing.Queue` hangs (pytorch#1355, #75147).

Wire format of one message: one byte, 0 for a plain message and 1 when the payload lies in an anonymous file that is
the last attached descriptor (payloads over `SPILL_NBYTES`); then the payload.
"""

from __future__ import annotations

import array
import os
import select
import socket
import weakref
from collections.abc import Sequence

from penstock.core.errors import TransportError
from penstock.core.walking import walk

SPILL_NBYTES = 60_000
_MAX_FDS = 4
_BUFFER_NBYTES = SPILL_NBYTES + 1
_PLAIN = b"\0"
_SPILLED = b"\1"

# Plain ints: combining the enum's members takes 2 µs for every message.
_SEND, _RECEIVE = int(socket.MSG_NOSIGNAL), int(socket.MSG_CMSG_CLOEXEC)
_AT_ONCE, _TRUNCATED = int(socket.MSG_DONTWAIT), int(socket.MSG_CTRUNC)
_ANCILLARY_NBYTES = socket.CMSG_SPACE(4 * _MAX_FDS)


class Closed(Exception):  # noqa: N818  an event, not an error
    """The other side is gone."""


_our_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the training process's ends in any process forked from it, or workers would never see them hang up."""
    for end in walk(_our_ends):
        end.close()


os.register_at_fork(after_in_child=_close_in_child)


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new channel: ours, which forked processes do not keep, and the workers'.

    Raises:
        TransportError: no descriptor is left.
    """
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise TransportError(
            f"no channel to a worker could be made ({error.strerror}); raise the limit with `ulimit -n`, "
            "or use fewer workers"
        ) from error
    _our_ends.add(ours)
    return ours, theirs


def send(end: socket.socket, payload: bytes | bytearray, fds: Sequence[int] = (), *, block: bool = True) -> bool:
    """Send one message; return False when `block` is false and the channel is full just now.

    Raises:
        Closed: nobody will ever read it.
    """
    flags = _SEND if block else _SEND | _AT_ONCE
    try:
        if len(payload) <= SPILL_NBYTES:
            if not fds:
                end.send(_PLAIN + payload, flags)
                return True
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            end.sendmsg((_PLAIN, payload), ancillary, flags)
            return True
        return _send_spilled(end, payload, fds, flags)
    except BlockingIOError:
        return False
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed from error


def _send_spilled(end: socket.socket, payload: bytes | bytearray, fds: Sequence[int], flags: int) -> bool:
    spill = os.memfd_create("penstock-message", os.MFD_CLOEXEC)
    try:
        view = memoryview(payload)
        while view:
            view = view[os.write(spill, view) :]
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [*fds, spill]))]
        end.sendmsg((_SPILLED,), ancillary, flags)
    finally:
        os.close(spill)
    return True


class Receiver:
    """Takes messages from one end, into one reused buffer."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._buffer = bytearray(_BUFFER_NBYTES)
        self._view = memoryview(self._buffer)

    def receive(self, *, block: bool = True) -> tuple[bytes, list[int]] | None:
        """Return the next message's payload and descriptors, or None when there is none and `block` is false.

        Raises:
            Closed: the other side is gone and everything it sent has been read.
            TransportError: a descriptor was sent and this process has none left to take it.
        """
        flags = _RECEIVE if block else _RECEIVE | _AT_ONCE
        try:
            size, ancillary, message_flags, _ = self.end.recvmsg_into([self._buffer], _ANCILLARY_NBYTES, flags)
        except BlockingIOError:
            return None
        except ConnectionResetError as error:
            raise Closed from error
        if size == 0:
            raise Closed
        if not ancillary and self._buffer[0] == 0:
            return bytes(self._view[1:size]), []
        fds: list[int] = []
        for _, _, data in ancillary:
            fds.extend(array.array("i", data[: len(data) - len(data) % 4]))
        if message_flags & _TRUNCATED:
            for fd in fds:
                os.close(fd)
            raise TransportError(
                "a shared segment arrived and no file descriptor was left for it; raise the limit with `ulimit -n`"
            )
        if self._buffer[0] == 0:
            return bytes(self._view[1:size]), fds
        spill = fds.pop()
        try:
            return _read_whole(spill), fds
        finally:
            os.close(spill)


def _read_whole(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    chunks: list[bytes] = []
    offset = 0
    while offset < size:
        chunk = os.pread(fd, size - offset, offset)
        chunks.append(chunk)
        offset += len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def wait_for_hangup(end: socket.socket) -> None:
    """Return when the other side of `end` is closed; takes no message."""
    poller = select.poll()
    poller.register(end, 0)
    poller.poll()
