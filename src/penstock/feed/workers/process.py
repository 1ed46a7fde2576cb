"""A pool of worker processes, watched over: who dies is noticed, and what he had is known exactly.

Work goes out by two roads. The shared queue is one end of a socket from which any free worker takes the next piece
(and claims it; see `transport.control`). A worker's inbox carries what is meant for that worker only: announcements,
and pieces that torch would have given to it. Results come back by one socket that all workers write to.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from penstock.core.errors import WorkerStartError
from penstock.feed.sources.stream import Stream
from penstock.feed.transport import channel, codec
from penstock.feed.transport.control import Control
from penstock.feed.transport.slab import Handle, Slab, attach
from penstock.feed.workers import child
from penstock.feed.workers.base import Death, Piece, Report
from penstock.feed.workers.child import ChildEnds, ChildOptions, Descriptor
from penstock.feed.workers.lanes import Lane
from penstock.feed.workers.maker import Job
from penstock.feed.workers.payload import Payload

_JOIN_S = 5.0
"""How long a worker may take to finish its sample when the pool closes; as torch's DataLoader waits."""

_Message = tuple[bytes, Slab | None]


class ProcessPool:
    """Worker processes of one loader; see `base.Pool` for the protocol."""

    def __init__(
        self,
        job: Job,
        workers: int,
        *,
        most: int,
        told: int,
        context: BaseContext,
        base_seed: int,
        init_fn: Callable[[int], Any] | None,
        watch: bool,
        named: bool,
        cores: frozenset[int] | None = None,
    ) -> None:
        self.size = workers
        self._job = job
        self._context = context
        self._named = named
        self._options = ChildOptions(
            worker=0, workers=told, base_seed=base_seed, init_fn=init_fn, named=named, watch=watch, cores=cores
        )
        self._slabs: dict[int, Slab] = {}
        self._outstanding: dict[int, Piece] = {}
        self._waiting: deque[bytes] = deque()
        self._outboxes: list[deque[_Message]] = [deque() for _ in range(most)]
        self._inboxes: list[Any] = [None] * most
        self._poller = select.poll()
        self._by_sentinel: dict[int, int] = {}
        self._retiring: dict[int, BaseProcess] = {}
        """Workers that were told to go and have not gone yet, by the number they had."""
        self._owner = os.getpid()
        self._closed = False
        self.processes: list[BaseProcess] = []
        self._payload = Payload.pack(job, self._method(), named=named)
        self._control = Control.make(most, named=named)
        self._to_workers, self._queue = channel.pair()
        self._results, self._from_workers = channel.pair()
        self._receiver = channel.Receiver(self._results)
        self._reclaimer = channel.Receiver(self._queue)
        self._poller.register(self._results, select.POLLIN)

    def _method(self) -> str:
        return self._context.get_start_method() or "fork"

    # ── starting ────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, lanes: Sequence[Lane]) -> None:
        """Start all workers.

        Raises:
            WorkerStartError: the system allows no further process.
            TransportError: no descriptor is left.
        """
        if self._method() == "forkserver":
            # So that the server imports torch once, not every worker. No effect on a server that runs already.
            self._context.set_forkserver_preload(["__main__", child.__name__])
        for worker in range(self.size):
            options = replace(self._options, lanes=self._share(lanes, worker))
            self.processes.append(self._spawn(worker, options))

    def _share(self, lanes: Sequence[Lane], worker: int) -> dict[int, Lane]:
        return {place: lane for place, lane in enumerate(lanes) if place % self.size == worker}

    def replace(self, worker: int, lanes: Sequence[Lane]) -> None:
        """Start a successor for a dead worker."""
        self._control.forget(worker)
        dataset = self._job.dataset
        epoch = dataset.epoch if isinstance(dataset, Stream) else None
        options = replace(self._options, lanes=self._share(lanes, worker), epoch=epoch)
        self.processes[worker] = self._spawn(worker, options)

    def resize(self, workers: int) -> bool:
        """Start workers or let the last ones go, until there are `workers`.

        Who goes finishes its piece first, and nobody waits for that. While it is at it, its number is taken: then no
        worker is started, and False is returned.

        Raises:
            WorkerStartError, TransportError: as `start`; those that could be started are there.
        """
        while self.size > workers:
            self.size -= 1
            self._retiring[self.size] = self.processes.pop()
            self._post(self.size, b"Q", None)
        while self.size < workers:
            if self.size in self._retiring:
                return False
            self._control.forget(self.size)
            self.processes.append(self._spawn(self.size, self._options))
            self.size += 1
        return True

    def is_ready(self, worker: int) -> bool:
        """Return whether a worker has got as far as to take pieces."""
        return self._control.claimed(worker) is not None or self._control.row(worker) > 0

    def present(self) -> int:
        """Return how many workers there are: a piece may be meant for any of them."""
        return self.size

    def outstanding(self) -> int:
        """Return how many pieces are given out and have not come back."""
        return len(self._outstanding)

    def _spawn(self, worker: int, options: ChildOptions) -> BaseProcess:
        ours, theirs = channel.pair()
        handle = self._control.handle()
        ends = ChildEnds(
            inbox=theirs,
            shared=self._queue,
            results=self._from_workers,
            control_nbytes=handle.nbytes,
            control=handle.name if handle.fd is None else Descriptor(handle.fd),  # type: ignore[arg-type]
            lock=Descriptor(self._control.lock_fd),
        )
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
            target=child.main, args=(replace(options, worker=worker), ends, self._payload), daemon=True
        )
        try:
            process.start()
        except OSError as error:
            ours.close()
            raise WorkerStartError(
                f"worker {worker} of {self.size} could not be started ({error.strerror}); lower num_workers, or raise "
                "the limits on processes and open files (`ulimit -u`, `ulimit -n`)"
            ) from error
        finally:
            theirs.close()
        self._inboxes[worker] = ours
        self._outboxes[worker] = deque((_slab_message(number, slab), slab) for number, slab in self._slabs.items())
        self._by_sentinel[process.sentinel] = worker
        self._poller.register(process.sentinel, select.POLLIN)
        self._flush_outbox(worker)
        return process

    # ── giving out ──────────────────────────────────────────────────────────────────────────────────────────

    def announce(self, number: int, slab: Slab | None) -> None:
        """Tell every worker of a new slab, or (None) that it may let go of one."""
        if slab is not None:
            self._slabs[number] = slab
            body = _slab_message(number, slab)
        else:
            del self._slabs[number]
            body = b"F" + pickle.dumps(number)
        for worker in (*range(len(self.processes)), *self._retiring):
            self._post(worker, body, slab)

    def submit(self, piece: Piece) -> None:
        """Give out a piece; never blocks."""
        slot, part = piece.slot, piece.part
        head = child.WORK.pack(
            piece.seq,
            self._control.cells[0],
            slot is not None,
            *((slot.slab, slot.offset, slot.nbytes) if slot is not None else (0, 0, 0)),
            *((part.start, part.stop, part.total) if part is not None else (0, 0, -1)),
            piece.lane,
            piece.epoch_seed or 0,
            piece.snapshot,
        )
        body = head + pickle.dumps(piece.indices, 5)
        self._outstanding[piece.seq] = piece
        if piece.worker is None:
            self._waiting.append(body)
            self._flush_queue()
        else:
            self._post(piece.worker, b"W" + body, None)

    def rewind(self, worker: int) -> None:
        """Put a worker's random state back to where it was before its first piece."""
        self._post(worker, b"R", None)

    def _post(self, worker: int, body: bytes, slab: Slab | None) -> None:
        self._outboxes[worker].append((body, slab))
        self._flush_outbox(worker)

    def _flush_outbox(self, worker: int) -> None:
        outbox = self._outboxes[worker]
        with contextlib.suppress(channel.Closed):  # the worker is dead, and will be found to be
            while outbox:
                body, slab = outbox[0]
                handle = slab.handle() if slab is not None else None
                fds = [handle.fd] if handle is not None and handle.fd is not None else []
                if not channel.send(self._inboxes[worker], body, fds, block=False):
                    return
                outbox.popleft()

    def _flush_queue(self) -> None:
        while self._waiting and channel.send(self._to_workers, self._waiting[0], block=False):
            self._waiting.popleft()

    # ── taking back ─────────────────────────────────────────────────────────────────────────────────────────

    def collect(self, timeout_s: float | None) -> list[Report | Death]:
        """Wait until something happens, at most `timeout_s` seconds, and return all that has happened."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            events: list[Report | Death] = [*self._reports()]
            if events:
                self._flush_all()
                return events
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = self._poller.poll(None if remaining is None else remaining * 1000)
            dead = [self._by_sentinel[fd] for fd, _ in ready if fd in self._by_sentinel]
            if dead:
                for worker in dead:
                    events += self._bury(worker)
                if events:
                    return events
                continue
            if not ready and remaining is not None and remaining <= 0:
                return []

    def _flush_all(self) -> None:
        if self._waiting:
            self._flush_queue()
        for worker, outbox in enumerate(self._outboxes):
            if outbox:
                self._flush_outbox(worker)

    def _reports(self) -> list[Report]:
        reports = []
        while (message := self._receiver.receive(block=False)) is not None:
            report = _parse(*message)
            report.piece = self._outstanding.pop(report.seq)
            reports.append(report)
        return reports

    def piece(self, worker: int) -> tuple[Piece | None, int]:
        """Return the piece that `worker` is making, and the row it has come to."""
        claimed = self._control.claimed(worker)
        return (None if claimed is None else self._outstanding.get(claimed)), self._control.row(worker)

    def _bury(self, worker: int) -> list[Report | Death]:
        """Find out what a dead worker had, and return what came in meanwhile and the death.

        Under the lock no worker is between taking a piece and claiming it. The results are read after the claims:
        a worker sends its result before it claims another piece, so what is neither queued nor claimed nor among the
        results has been lost with its worker.
        """
        is_retired = worker in self._retiring
        process = self._retiring.pop(worker) if is_retired else self.processes[worker]
        self._poller.unregister(process.sentinel)
        del self._by_sentinel[process.sentinel]
        process.join()
        with self._control.lock():
            self._reclaim()
            others = {*range(self.size), *self._retiring} - {worker}
            claims = {self._control.claimed(other) for other in others}
        reports = self._reports()
        blamed, row = self.piece(worker)
        queued = {_seq(body) for body in self._waiting}
        lost = [
            piece
            for seq, piece in self._outstanding.items()
            if piece.worker == worker or (piece.worker is None and seq not in queued and seq not in claims)
        ]
        for piece in lost:
            del self._outstanding[piece.seq]
        self._inboxes[worker].close()
        self._outboxes[worker].clear()
        self._flush_queue()
        if is_retired and not lost:
            return [*reports]
        cause, pid = _cause(process.exitcode), process.pid or 0
        return [*reports, Death(worker, pid, cause, lost, blamed if blamed in lost else None, row, is_retired)]

    def _reclaim(self) -> None:
        """Take back everything that waits in the shared queue, in order, in front of what did not fit in yet."""
        bodies = []
        while (message := self._reclaimer.receive(block=False)) is not None:
            bodies.append(message[0])
        self._waiting.extendleft(reversed(bodies))

    def cancel(self, lanes: Sequence[Lane]) -> list[Piece]:
        """Abandon all pieces and begin a new epoch with these lanes; return the pieces that no worker had taken."""
        self._control.cells[0] += 1
        with self._control.lock():
            self._reclaim()
        untaken = [self._outstanding.pop(_seq(body)) for body in self._waiting]
        self._waiting.clear()
        for piece in self._outstanding.values():
            piece.cancelled = True
        for worker in range(self.size):
            self._post(worker, b"E" + pickle.dumps(self._share(lanes, worker)), None)
        return untaken

    # ── ending ──────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Stop the workers and wait for them; who does not end in time is killed."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        self._control.cells[0] += 1
        for inbox in self._inboxes:
            if inbox is not None:
                inbox.close()
        deadline = time.monotonic() + _JOIN_S
        everybody = [*self.processes, *self._retiring.values()]
        for process in everybody:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in everybody:
            if process.is_alive():
                process.kill()
                process.join()
        for end in (self._to_workers, self._queue, self._results, self._from_workers):
            end.close()
        self._payload.close()
        self._control.close()


def _slab_message(number: int, slab: Slab) -> bytes:
    handle = slab.handle()
    return b"S" + pickle.dumps((number, handle.nbytes, handle.name))


def _seq(body: bytes) -> int:
    (seq,) = struct.unpack_from("<Q", body)
    return int(seq)


def _parse(body: bytes, fds: list[int]) -> Report:
    head, extra, envelope = child.parse_result(body)
    seq, worker, outcome, samples, nbytes, fetch_ns, collate_ns, began_ns, pid = head
    report = Report(seq, worker, samples=samples, nbytes=nbytes, pid=pid, began_ns=began_ns)
    report.fetch_ns, report.collate_ns = fetch_ns, collate_ns
    if extra is not None:
        report.evidence, report.skipped, report.needed, segment, state = extra
        report.state = pickle.loads(state) if state else None
        if segment is not None:
            handle = Handle(segment[0], fds[0] if fds else None, segment[1])
            report.oversize = attach(handle, own=True)
    match outcome:
        case child.BATCH:
            report.envelope = bytes(envelope)
        case child.PART:
            report.part = codec.decode(envelope, None)
        case child.ENDED:
            report.ended = True
        case child.EMPTY:
            report.empty = True
        case child.FAILED:
            report.error = pickle.loads(envelope)
        case child.CANCELLED:
            report.cancelled = True
    return report


def _cause(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"is killed by signal: {signal.strsignal(-exitcode) or -exitcode}."
    return f"exited unexpectedly with code {exitcode}."
