"""One trainer, simulated event by event: a bounded window, batches in order, samples of uneven cost.

    loop ──pieces──▶ queue ──▶ a free worker makes it ──▶ the link, one after another ──▶ report ──▶ loop, in order
      └── as many batches under way as the window allows; none is handed out before the one in front of it

Who fills what, and how many batches are under way, is decided by the loader's own rule (`penstock.feed.dispatch`), told
simulated times. What is left out: processors (`trainer.pace` has them), and what is random in an operating system.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from benchmarks.scaling.trainer import Pace, Trainer, pace
from penstock.feed.dispatch import Dispatch


@dataclass(frozen=True, kw_only=True)
class Course:
    """What happened."""

    handed_s: list[float]
    """When each batch was handed out, in order."""

    busy_s: float
    """What workers worked, in all, until the last batch was handed out: finished pieces only."""

    made: int
    """Samples in finished pieces."""


def simulate(trainer: Trainer, samples_s: Sequence[float], batches: int) -> Course:
    """Run `trainer` for so many batches of an epoch without end; sample i takes `samples_s[i mod len(samples_s)]`.

    By hand: one worker, batches of 2, samples of 1 s, nothing else costs anything: a batch every 2 s.

    >>> simulate(Trainer(workers=1, batch_size=2), [1.0], batches=3).handed_s
    [2.0, 4.0, 6.0]
    """
    return _Simulation(trainer, samples_s).run(batches)


def simulated_pace(trainer: Trainer, samples_s: Sequence[float], *, skip: int = 0, batches: int = 200) -> Pace:
    """Return the pace over `batches` after the first `skip + 1`, and never more than its processors allow."""
    mean_s = sum(samples_s) / len(samples_s)
    course = simulate(trainer, samples_s, skip + 1 + batches)
    seconds = course.handed_s[-1] - course.handed_s[skip]
    by_formula = pace(trainer, mean_s)
    simulated = batches * trainer.batch_size / seconds if seconds > 0 else float("inf")
    if by_formula.bound == "cores" and by_formula.samples_per_s < simulated:
        return by_formula
    return Pace(samples_per_s=simulated, bound=by_formula.bound)


@dataclass(eq=False)
class _Batch:
    left: int = 0
    work_s: float = 0.0


@dataclass(eq=False)
class _Piece:
    batch: _Batch
    rows: int
    work_s: float
    link_s: float


class _Simulation:
    def __init__(self, trainer: Trainer, samples_s: Sequence[float]) -> None:
        self._trainer = trainer
        self._sums = [0.0, *accumulate(samples_s)]
        self._dispatch = Dispatch(
            "demand",
            "",
            workers=trainer.workers,
            prefetch_factor=trainer.prefetch_factor,
            splittable=trainer.is_split,
        )
        self._dispatch.begin_epoch()
        self._now = 0.0
        self._free = trainer.workers
        self._queue: deque[_Piece] = deque()
        self._events: list[tuple[float, int, bool, _Piece]] = []
        self._order = 0
        self._link_free = 0.0
        self._reports: deque[_Piece] = deque()
        self._batches: deque[_Batch] = deque()
        self._rows_sent = 0
        self._busy_s = 0.0
        self._made = 0

    def run(self, batches: int) -> Course:
        handed = []
        for _ in range(batches):
            self._send_more()
            while self._batches[0].left:
                self._wait()
            self._batches.popleft()
            self._send_more()
            self._pass(self._trainer.handling_s)
            handed.append(self._now)
            self._pass(self._trainer.step_s)
        return Course(handed_s=handed, busy_s=self._busy_s, made=self._made)

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────────

    def _send_more(self) -> None:
        rows = self._trainer.batch_size
        while len(self._batches) < self._dispatch.window():
            batch = _Batch()
            self._batches.append(batch)
            parts = self._dispatch.parts(rows)
            bounds = [rows * part // parts for part in range(parts + 1)]
            for start, stop in pairwise(bounds):
                self._submit(batch, stop - start)

    def _submit(self, batch: _Batch, rows: int) -> None:
        trainer = self._trainer
        work_s = trainer.piece_s + trainer.trip_s + rows * trainer.row_s + self._samples_s(rows)
        batch.left += 1
        self._queue.append(_Piece(batch=batch, rows=rows, work_s=work_s, link_s=rows * trainer.link_s))
        self._put_to_work(self._now)

    def _samples_s(self, rows: int) -> float:
        """Return what the next `rows` samples take."""
        period = len(self._sums) - 1
        began, self._rows_sent = self._rows_sent, self._rows_sent + rows
        rounds = self._rows_sent // period - began // period
        return rounds * self._sums[-1] + self._sums[self._rows_sent % period] - self._sums[began % period]

    def _wait(self) -> None:
        idle = max(0, self._trainer.workers - sum(batch.left for batch in self._batches))
        began = self._now
        while not self._reports:
            self._now = max(self._now, self._happen())
        if idle:
            self._dispatch.starved(round((self._now - began) * 1e9) * idle)
        while self._reports:
            batch = self._hear(self._reports.popleft())
            if not batch.left:
                self._dispatch.learn(round(batch.work_s * 1e9))

    def _hear(self, piece: _Piece) -> _Batch:
        self._pass(self._trainer.report_s)
        piece.batch.left -= 1
        piece.batch.work_s += piece.work_s - self._trainer.piece_s
        return piece.batch

    # ── the workers, and the link ───────────────────────────────────────────────────────────────────────────

    def _pass(self, seconds: float) -> None:
        """Let time pass for the loop; workers go on meanwhile."""
        self._now += seconds
        while self._events and self._events[0][0] <= self._now:
            self._happen()

    def _happen(self) -> float:
        """Let the next thing happen, and return when it did."""
        when, _, is_through, piece = heapq.heappop(self._events)
        if not is_through:
            self._busy_s += piece.work_s
            self._link_free = max(self._link_free, when) + piece.link_s
            self._expect(self._link_free if piece.link_s else when, piece, is_through=True)
            return when
        self._made += piece.rows
        self._free += 1
        self._reports.append(piece)
        self._put_to_work(when)
        return when

    def _put_to_work(self, when: float) -> None:
        while self._free and self._queue:
            self._free -= 1
            piece = self._queue.popleft()
            self._expect(when + piece.work_s, piece, is_through=False)

    def _expect(self, when: float, piece: _Piece, *, is_through: bool) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, is_through, piece))
