"""The life of a worker process, from its first line to its last.

It runs the user's dataset and collate function, and nothing of the training loop: this module and what it imports
must not import `penstock.device`. The process ends when its inbox is closed, also when the training process is
killed, and then also in the middle of a sample.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper

from penstock.core.errors import TransportError
from penstock.feed.collate import set_current_room
from penstock.feed.transport import channel, codec
from penstock.feed.transport.control import IDLE, Control
from penstock.feed.transport.room import NoRoomError, Room
from penstock.feed.transport.slab import Handle, MemfdSlab, NamedSlab, attach, create
from penstock.feed.workers.maker import BatchMaker, Made, NothingLeftError, Part
from penstock.feed.workers.payload import Payload
from penstock.feed.workers.workshop import WorkerOptions, Workshop

_ORPHAN_GRACE_S = 5.0
"""How long a worker whose training process is gone may take to finish a sample before it ends anyway."""

WORK = struct.Struct("<QQBqqqqqqIQB")
"""Head of a piece of work: seq, epoch, has slot, slab, offset, nbytes, start, stop, total (-1: whole batch), lane,
epoch's seed, whether the lane's state is wanted."""

RESULT = struct.Struct("<QIBQQQQQI")
"""Head of a result: seq, worker, outcome, samples, batch bytes, fetch ns, collate ns, began ns, pid."""

BATCH, PART, ENDED, EMPTY, FAILED, CANCELLED = range(6)
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildOptions(WorkerOptions):
    """What a worker process is started with, besides its job."""

    named: bool
    """Whether shared segments have names, for want of memfds."""
    cores: frozenset[int] | None = None
    """Where to run, or None for anywhere."""


class Descriptor:
    """A file descriptor that survives the way into a worker process, by whatever start method."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        """Called while a process is being started."""
        return _receive_descriptor, (DupFd(self.fd),)


def _receive_descriptor(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())


@dataclass(frozen=True, slots=True)
class ChildEnds:
    """The descriptors of a worker process."""

    inbox: socket.socket
    shared: socket.socket
    results: socket.socket
    control_nbytes: int
    control: Descriptor | str
    """The control page's descriptor, or its name."""
    lock: Descriptor


class _CancelledError(Exception):
    """The epoch of this piece is over."""


def main(options: ChildOptions, ends: ChildEnds, payload: Payload) -> None:
    """Run a worker until its inbox closes."""
    with contextlib.suppress(channel.Closed):
        _watch_for_orphanhood(ends.inbox)
        # Ctrl-C reaches the whole process group; what to do about it is for the training process to say.
        signal.signal(signal.SIGINT, lambda *_: None)
        worker = _Worker(options, ends)
        worker.prepare(payload)
        worker.run()


def _watch_for_orphanhood(inbox: socket.socket) -> None:
    def watch() -> None:
        channel.wait_for_hangup(inbox)
        threading.Event().wait(_ORPHAN_GRACE_S)
        os._exit(0)

    with contextlib.suppress(RuntimeError):  # no thread to be had: then it ends when it has finished its sample
        threading.Thread(target=watch, name="penstock-orphan-watch", daemon=True).start()


class _Worker:
    _shop: Workshop

    def __init__(self, options: ChildOptions, ends: ChildEnds) -> None:
        self._options = options
        self._ends = ends
        self._pid = os.getpid()
        self._inbox = channel.Receiver(ends.inbox)
        self._shared = channel.Receiver(ends.shared)
        page = ends.control
        handle = (
            Handle(ends.control_nbytes, name=page) if isinstance(page, str) else Handle(ends.control_nbytes, page.fd)
        )
        self._control = Control.attach(handle, ends.lock.fd)
        self._cells = self._control.cells
        self._claim_cell = 1 + 2 * options.worker
        self._slabs: dict[int, tuple[MemfdSlab | NamedSlab, np.ndarray]] = {}
        self._is_retired = False

    # ── before the first piece ──────────────────────────────────────────────────────────────────────────────

    def prepare(self, payload: Payload) -> None:
        """Set up the workshop, on the cores that are meant for it."""
        options = self._options
        torch.multiprocessing._set_thread_name("pt_data_worker")
        if options.cores is not None:
            with contextlib.suppress(OSError):  # cores may have been taken away meanwhile; anywhere, then
                os.sched_setaffinity(0, options.cores)
        self._shop = Workshop(
            options, payload.open, where=f"in DataLoader worker process {options.worker}", dumps=pickle.dumps
        )

    def run(self) -> None:
        """Take pieces until the inbox closes, or this worker is told that it is one too many."""
        poller = select.poll()
        poller.register(self._ends.inbox, select.POLLIN)
        poller.register(self._ends.shared, select.POLLIN)
        inbox = self._ends.inbox.fileno()
        self._cells[self._claim_cell + 1] = 1  # before a worker's first claim: it is ready
        while not self._is_retired:
            ready = [fd for fd, _ in poller.poll()]
            if inbox in ready:
                self._obey()
            else:
                self._help_oneself()

    def _obey(self) -> None:
        message = self._inbox.receive()
        assert message is not None
        body, fds = message
        kind = body[:1]
        if kind == b"W":
            self._work(memoryview(body)[1:])
            self._cells[self._claim_cell + 1] = IDLE
        elif kind == b"S":
            number, nbytes, name = pickle.loads(memoryview(body)[1:])
            try:
                slab = attach(Handle(nbytes, fds[0] if fds else None, name))
            except TransportError as error:
                if isinstance(error.__cause__, FileNotFoundError):  # removed already: the training process is closing
                    raise channel.Closed from error
                raise
            self._slabs[number] = (slab, np.frombuffer(slab.memory, np.uint8))
        elif kind == b"F":
            slab, memory = self._slabs.pop(pickle.loads(memoryview(body)[1:]))
            del memory
            slab.close()
        elif kind == b"E":
            self._shop.begin_epoch(pickle.loads(memoryview(body)[1:]))
        elif kind == b"Q":
            self._is_retired = True
        elif kind == b"R":
            self._shop.rewind()

    def _help_oneself(self) -> None:
        """Take a piece from the shared queue, if another worker has not been faster, and claim it under the lock."""
        with self._control.lock():
            message = self._shared.receive(block=False)
            if message is None:
                return
            (seq,) = struct.unpack_from("<Q", message[0])
            self._cells[self._claim_cell] = seq + 1
        self._work(memoryview(message[0]))
        self._cells[self._claim_cell + 1] = IDLE

    # ── one piece ───────────────────────────────────────────────────────────────────────────────────────────

    def _work(self, message: memoryview) -> None:
        head = WORK.unpack_from(message)
        seq, epoch, has_slot, slab, offset, nbytes, start, stop, total, lane, epoch_seed, snapshot = head
        cells = self._cells
        row_cell = self._claim_cell + 1
        cells[row_cell] = 0
        cells[self._claim_cell] = seq + 1
        if cells[0] != epoch:
            self._send(seq, CANCELLED)
            return
        if (broken := self._shop.take_failure()) is not None:
            self._send_failure(seq, broken)
            return
        maker = self._shop.maker(lane)
        if maker is None:
            self._send(seq, ENDED)
            return

        def tick(row: int) -> None:
            if cells[0] != epoch:
                raise _CancelledError
            cells[row_cell] = row

        while has_slot and slab not in self._slabs:
            self._obey()  # its announcement was sent before this piece, and is in the inbox or on its way there
        memory = self._slabs[slab][1][offset : offset + nbytes] if has_slot else np.empty(0, np.uint8)
        part = Part(start, stop, total) if total >= 0 else None
        try:
            indices = pickle.loads(message[WORK.size :])
            self._make(maker, seq, indices, Room(memory), tick, part, epoch_seed, snapshot)
        except _CancelledError:
            self._send(seq, CANCELLED)
        except channel.Closed:
            raise
        except NothingLeftError as nothing:
            self._send(seq, EMPTY, made=nothing.made)
        except Exception:
            self._send_failure(seq, self._shop.wrap_exception())

    def _make(
        self,
        maker: BatchMaker,
        seq: int,
        indices: Any,
        room: Room,
        tick: Callable[[int], None],
        part: Part | None,
        epoch_seed: int,
        snapshot: bool,
    ) -> None:
        segments: list[MemfdSlab | NamedSlab] = []

        def enlarge(needed: int) -> Room:
            """Return room in a segment of its own, for a batch that outgrew its slot."""
            segments.append(create(needed, named=self._options.named))
            return Room(np.frombuffer(segments[-1].memory, np.uint8))

        set_current_room(room)
        try:
            made = maker.make(indices, room, epoch_seed=epoch_seed, tick=tick, part=part, enlarge=enlarge)
            if snapshot or made.ended:
                made.state = self._shop.state(maker, ended=made.ended)
            if made.ended:
                self._send(seq, ENDED, made=made)
            elif part is not None:
                self._send(seq, PART, codec.encode(made.part, None), made)
            else:
                assert made.room is not None
                try:
                    envelope = codec.encode(made.batch, made.room)
                except NoRoomError as error:
                    made.room = enlarge(error.needed)
                    envelope = codec.encode(made.batch, made.room)
                oversize = segments[-1] if segments and not codec.is_inband(envelope) else None
                self._send(seq, BATCH, envelope, made, oversize)
        finally:
            set_current_room(None)
            for segment in segments:
                segment.close()

    # ── answers ─────────────────────────────────────────────────────────────────────────────────────────────

    def _send(
        self,
        seq: int,
        outcome: int,
        envelope: bytes = b"",
        made: Made | None = None,
        oversize: MemfdSlab | NamedSlab | None = None,
    ) -> None:
        made = made or Made()
        evidence = self._shop.evidence()
        handle = oversize.give_away() if oversize is not None else None
        extra = b""
        if evidence or made.skipped or made.needed or made.state or handle is not None:
            segment = handle and (handle.nbytes, handle.name)
            extra = pickle.dumps((evidence, made.skipped, made.needed, segment, made.state))
        used = made.room.used if made.room is not None else 0
        times = (made.fetch_ns, made.collate_ns, made.began_ns, self._pid)
        head = RESULT.pack(seq, self._options.worker, outcome, made.samples, used, *times)
        body = b"".join((head, _LENGTH.pack(len(extra)), extra, envelope))
        channel.send(self._ends.results, body, [handle.fd] if handle is not None and handle.fd is not None else [])

    def _send_failure(self, seq: int, wrapper: ExceptionWrapper) -> None:
        self._send(seq, FAILED, pickle.dumps(wrapper))


def parse_result(body: bytes) -> tuple[tuple[int, ...], tuple[Any, ...] | None, memoryview]:
    """Return the head, the extra and the envelope of a result message."""
    head = RESULT.unpack_from(body)
    (length,) = _LENGTH.unpack_from(body, RESULT.size)
    at = RESULT.size + _LENGTH.size
    extra = pickle.loads(memoryview(body)[at : at + length]) if length else None
    return head, extra, memoryview(body)[at + length :]
