"""A pool of threads, for datasets that release the GIL while they read and decode, and for free-threaded Python.

Threads share the dataset, the process's random states and `get_worker_info()` (None), so nothing tells one from
another: any free thread takes the next piece.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch._utils import ExceptionWrapper

from penstock.core.units import round_up
from penstock.feed.transport import codec
from penstock.feed.transport.room import NoRoomError, Room
from penstock.feed.transport.slab import PAGE, PrivateSlab, Slab
from penstock.feed.workers.base import Death, Piece, Report
from penstock.feed.workers.lanes import Lane, Lanes
from penstock.feed.workers.maker import Job, NothingLeftError


class _CancelledError(Exception):
    """The epoch of this piece is over."""


class ThreadPool:
    """Worker threads of one loader; see `base.Pool` for the protocol."""

    def __init__(self, job: Job, workers: int) -> None:
        self.size = workers
        self.processes: list[Any] = []
        self._job = job
        self._work: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._outstanding: dict[int, Piece] = {}
        self._epoch: tuple[int, dict[int, Lane]] = (0, {})
        """Counts epochs, with the lanes of each; threads look at it before each piece."""
        self._threads: list[threading.Thread] = []
        self._closed = False

    def start(self, lanes: Sequence[Lane]) -> None:
        """Start the threads; lanes are those of one thread."""
        self._epoch = 0, dict(enumerate(lanes))
        for _ in range(self.size):
            self._start_one()

    def _start_one(self) -> None:
        number = len(self._threads)
        thread = threading.Thread(target=self._run, args=(number,), name=f"penstock-worker-{number}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def resize(self, workers: int) -> bool:
        """Start threads or let some go, until there are `workers`; who goes finishes its piece first."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for _ in range(self.size, workers):
            self._start_one()
        for _ in range(workers, self.size):
            self._work.put(None)
        self.size = workers
        return True

    def is_ready(self, worker: int) -> bool:
        """Return that it is: threads start at once."""
        return True

    def present(self) -> int:
        """Return how many workers there are: a piece may be meant for any of them."""
        return self.size

    def outstanding(self) -> int:
        """Return how many pieces are given out and have not come back."""
        return len(self._outstanding)

    def announce(self, number: int, slab: Slab | None) -> None:
        """Do nothing: threads see all memory of their process."""

    def submit(self, piece: Piece) -> None:
        """Give out a piece; never blocks."""
        self._outstanding[piece.seq] = piece
        self._work.put(piece)

    def rewind(self, worker: int) -> None:
        """Do nothing: threads have no random state of their own."""

    def replace(self, worker: int, lanes: Sequence[Lane]) -> None:
        """Do nothing: a thread does not die alone."""

    def piece(self, worker: int) -> tuple[Piece | None, int]:
        """Return no piece: it is not known which thread has which."""
        return None, 0

    def collect(self, timeout_s: float | None) -> list[Report | Death]:
        """Wait until something happens, at most `timeout_s` seconds, and return all that has happened."""
        reports: list[Report] = []
        try:
            reports.append(self._done.get(timeout=timeout_s))
            while True:
                reports.append(self._done.get_nowait())
        except queue.Empty:
            pass
        for report in reports:
            report.piece = self._outstanding.pop(report.seq)
        return [*reports]

    def cancel(self, lanes: Sequence[Lane] = ()) -> list[Piece]:
        """Abandon all pieces and begin a new epoch; return the pieces that no thread had taken."""
        self._epoch = self._epoch[0] + 1, dict(enumerate(lanes))
        untaken = []
        going = 0
        for piece in self._outstanding.values():
            piece.cancelled = True
        try:
            while True:
                waiting = self._work.get_nowait()
                if waiting is None:
                    going += 1
                else:
                    untaken.append(self._outstanding.pop(waiting.seq))
        except queue.Empty:
            pass
        for _ in range(going):
            self._work.put(None)
        return untaken

    def close(self) -> None:
        """Stop the threads after the samples they are making."""
        if self._closed:
            return
        self._closed = True
        self.cancel()
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, worker: int) -> None:
        lanes: Lanes | None = None
        begun = -1
        while (piece := self._work.get()) is not None:
            report = Report(piece.seq, worker)
            try:
                if begun != self._epoch[0]:
                    begun, shares = self._epoch
                    lanes = self._begun(lanes, shares)
                self._make(lanes, piece, report)
            except _CancelledError:
                report.cancelled = True
            except NothingLeftError as nothing:
                report.empty = True
                report.skipped = nothing.made.skipped
            except Exception:
                report.error = ExceptionWrapper(where=f"in DataLoader worker thread {worker}")
            self._done.put(report)
            del piece, report

    def _begun(self, lanes: Lanes | None, shares: dict[int, Lane]) -> Lanes:
        if lanes is None:
            return Lanes(self._job, shares, lambda lane, job: None)
        lanes.begin(shares)
        return lanes

    def _make(self, lanes: Lanes | None, piece: Piece, report: Report) -> None:
        maker = lanes.maker(piece.lane) if lanes is not None else None
        if maker is None:
            report.ended = True
            return

        def tick(_: int) -> None:
            if piece.cancelled:
                raise _CancelledError

        def enlarge(needed: int) -> Room:
            report.oversize = PrivateSlab(round_up(needed, PAGE))
            return Room(np.frombuffer(report.oversize.memory, np.uint8))

        memory = np.frombuffer(piece.slot.memory, np.uint8) if piece.slot is not None else np.empty(0, np.uint8)
        made = maker.make(
            piece.indices, Room(memory), epoch_seed=piece.epoch_seed, tick=tick, part=piece.part, enlarge=enlarge
        )
        if piece.snapshot or made.ended:
            report.state = maker.end_state() if made.ended else maker.snapshot()
        report.samples, report.skipped, report.ended = made.samples, made.skipped, made.ended
        report.needed = made.needed
        report.fetch_ns, report.collate_ns, report.began_ns = made.fetch_ns, made.collate_ns, made.began_ns
        if piece.part is not None:
            report.part = made.part
        elif not made.ended:
            assert made.room is not None
            try:
                report.envelope = codec.encode(made.batch, made.room)
            except NoRoomError as error:
                made.room = enlarge(error.needed)
                report.envelope = codec.encode(made.batch, made.room)
            report.nbytes = made.room.used
            if codec.is_inband(report.envelope):
                report.oversize = None
