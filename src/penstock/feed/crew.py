"""The crew: a pool whose number of workers follows the rule in `auto`, or stays what it is.

Nothing that is under way is disturbed: who is told to go finishes its piece first, and who comes takes what is next.
With nobody in the crew, the training process makes its batches itself, when they are asked for.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from torch._utils import ExceptionWrapper

from penstock.core.errors import TransportError, WorkerStartError
from penstock.core.host import available_nbytes
from penstock.feed.auto import Lap, Regulator
from penstock.feed.counters import Counters
from penstock.feed.dispatch import Dispatch
from penstock.feed.transport.ring import Ring, Slot
from penstock.feed.transport.room import Room
from penstock.feed.workers.base import Piece, Pool, Report
from penstock.feed.workers.maker import BatchMaker, Job, NothingLeftError

_LEFT_NBYTES = 256 << 20
"""No worker is started when the memory left to this process is less."""


class Crew:
    """Keeps a pool at the number that `regulator` wants; without one, at the number it has.

    All methods are called by the thread that iterates. `handed_out` for every batch.
    """

    def __init__(
        self, *, job: Job, pool: Pool, ring: Ring, dispatch: Dispatch, counters: Counters, regulator: Regulator | None
    ) -> None:
        self.pieces: deque[Piece] = deque()
        """What the training process is to make itself."""
        self._job = job
        self._pool = pool
        self._ring = ring
        self._dispatch = dispatch
        self._counters = counters
        self._regulator = regulator
        self._maker: BatchMaker | None = None
        self._new: set[int] = set()
        """Workers that were started and are not at work yet."""
        self._seen: tuple[int, int, int] | None = None
        self._is_behind = False
        self.is_absent = regulator is not None and pool.size == 0
        """Whether batches are made in the training process."""
        self._tell()

    def begin_epoch(self) -> None:
        """The pipeline is empty: what its first batch shows says nothing."""
        self._seen = None

    def handed_out(self, number: int, work_ns: int, next_number: int) -> None:
        """Take note that a batch is handed out, and change the number of workers if the rule says so.

        Batches from `next_number` on are not given out yet.
        """
        regulator, counters = self._regulator, self._counters
        if regulator is None:
            return
        now = counters.step_ns, counters.transport_ns, counters.wait_ns
        before, self._seen = self._seen, now
        if before is None:
            regulator.begin(number + 1)
            return
        lap = Lap(
            number=number,
            step_ns=now[0] - before[0],
            handling_ns=now[1] - before[1],
            wait_ns=now[2] - before[2],
            work_ns=work_ns,
        )
        if self._dispatch.mode != "demand":
            if self._pool.size:  # the last worker was about to go when a sample showed that it can tell
                self.is_absent = self._is_behind = False
            regulator.note(lap)
        elif self._is_behind:
            self._follow(next_number)
        elif self._new:
            self._new = {worker for worker in self._new if not self._pool.is_ready(worker)}
            if not self._new:
                regulator.begin(next_number)
        else:
            present = regulator.workers
            if regulator.observe(lap) != present:
                self._follow(next_number)

    def fix(self) -> None:
        """Have the number of an epoch in which it must not change: samples can tell their worker."""
        if self._regulator is None:
            return
        try:
            self._pool.resize(self._regulator.choose())
        except (WorkerStartError, TransportError):
            self._regulator.fixed_reason = "the system starts no more"
        self._dispatch.resize(self._pool.size)
        self._tell()

    def mourn(self) -> None:
        """Take note that a worker has died: what kills a worker must not be made in the training process."""
        if self._regulator is not None:
            self._regulator.insist()
            if self.is_absent:
                self._follow(0)
                while self.pieces and self._pool.size:
                    self._pool.submit(self.pieces.popleft())

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _follow(self, next_number: int) -> None:
        """Bring the pool to the number that is wanted, as far as that can be done now."""
        assert self._regulator is not None
        wanted, present = self._regulator.workers, self._pool.size
        if wanted > present and available_nbytes() < _LEFT_NBYTES:
            self._regulator.limit(present, "there is no memory left for more")
            wanted = present
        if wanted == 0 and self._pool.outstanding():
            self.is_absent = self._is_behind = True  # the last worker finishes what it was given
            return
        try:
            self._is_behind = not self._pool.resize(wanted)
        except (WorkerStartError, TransportError):
            self._is_behind = False
            self._regulator.limit(self._pool.size, "the system starts no more")
        self.is_absent = self._pool.size == 0
        self._dispatch.resize(max(1, self._pool.size))
        self._new = set(range(present, self._pool.size))
        if not self._new:
            self._regulator.begin(next_number)
        self._tell()

    def _tell(self) -> None:
        if self._regulator is None:
            return
        self._counters.workers = self._pool.size
        if self._dispatch.mode == "round_robin":
            why = f"{self._regulator.fixed_reason}; samples can tell their worker, so it changes between epochs only"
        else:
            why = self._regulator.reason
        self._counters.workers_reason = f"auto: {why}"

    # ── without workers ─────────────────────────────────────────────────────────────────────────────────────

    def make(self) -> Report:
        """Make the next piece here and now."""
        piece = self.pieces[0]  # and it stays there when Ctrl-C comes
        report = Report(piece.seq, -1, piece)
        try:
            self._maker = self._maker or BatchMaker(self._job, in_training_process=True)
            self._make(self._maker, piece, report)
        except NothingLeftError as nothing:
            report.empty, report.skipped = True, nothing.made.skipped
        except Exception:  # noqa: BLE001  the user's dataset runs here
            report.error = ExceptionWrapper(where="in the training process, which makes its batches itself")
        self.pieces.popleft()
        return report

    def _make(self, maker: BatchMaker, piece: Piece, report: Report) -> None:
        def enlarge(needed: int) -> Room:
            self._ring.require(needed)
            return Room(np.empty(needed, np.uint8))

        slot = piece.slot if piece.part is not None else piece.into.slot
        room = Room(self._memory_of(piece, slot))
        made = maker.make(piece.indices, room, epoch_seed=piece.epoch_seed, part=piece.part, enlarge=enlarge)
        report.samples, report.skipped, report.needed = made.samples, made.skipped, made.needed
        report.fetch_ns, report.collate_ns = made.fetch_ns, made.collate_ns
        if piece.part is not None:
            report.part = made.part
            return
        report.batch, report.is_batch = made.batch, True
        report.nbytes = made.room.used if made.room is not None else 0
        if slot is not None and made.room is room:
            self._ring.note(slot, room.used)

    def _memory_of(self, piece: Piece, slot: Slot | None) -> np.ndarray:
        """Return the memory of a piece's slot; a whole batch's is lent at once, and free when its views have died."""
        if slot is None:
            return np.empty(0, np.uint8)
        if piece.part is not None:
            return np.frombuffer(slot.memory, np.uint8)
        piece.into.slot = None
        self._ring.commit(slot, 0)
        return self._ring.lend(slot)
