"""One trainer, simulated event by event: a bounded window, batches in order, samples of uneven cost.

    loop ──tasks──▶ queue ──▶ a free worker makes it ──▶ the link, one after another ──▶ result ──▶ loop, in order
      └── at most as many batches in flight as the window allows, handed out in order

The loader's own rule (`penstock.loader.scheduling.dispatch_policy`), given simulated times, assigns tasks and sizes the
window. Left out: processors (`trainer.pace` has them), and the randomness of an operating system.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from benchmarks.scaling.trainer import Pace, Trainer, pace
from penstock.loader.scheduling.dispatch_policy import Dispatch


@dataclass(frozen=True, kw_only=True)
class SimulatedEpoch:
    """The outcome of a simulation."""

    handed_out_s: list[float]
    """When each batch was handed out, in order."""

    busy_s: float
    """The workers' busy time in total until the last batch was handed out, in finished tasks only."""

    samples: int
    """Samples in finished tasks."""


def simulate(trainer: Trainer, samples_s: Sequence[float], batches: int) -> SimulatedEpoch:
    """Run `trainer` for `batches` batches of an endless epoch; sample i takes `samples_s[i mod len(samples_s)]`.

    By hand: one worker, batches of 2, samples of 1 s, nothing else costs anything: a batch every 2 s.

    >>> simulate(Trainer(workers=1, batch_size=2), [1.0], batches=3).handed_out_s
    [2.0, 4.0, 6.0]
    """
    return _Simulation(trainer, samples_s).run(batches)


def simulated_pace(trainer: Trainer, samples_s: Sequence[float], *, skip: int = 0, batches: int = 200) -> Pace:
    """Return the pace over `batches` after the first `skip + 1`, and never more than its processors allow."""
    mean_s = sum(samples_s) / len(samples_s)
    epoch = simulate(trainer, samples_s, skip + 1 + batches)
    seconds = epoch.handed_out_s[-1] - epoch.handed_out_s[skip]
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
class _Task:
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
        )
        self._dispatch.begin_epoch()
        self._now = 0.0
        self._free = trainer.workers
        self._queue: deque[_Task] = deque()
        self._events: list[tuple[float, int, bool, _Task]] = []
        self._order = 0
        self._link_free_s = 0.0
        self._results: deque[_Task] = deque()
        self._batches: deque[_Batch] = deque()
        self._rows_sent = 0
        self._busy_s = 0.0
        self._samples_made = 0

    def run(self, batches: int) -> SimulatedEpoch:
        handed = []
        for _ in range(batches):
            self._fill_window()
            while self._batches[0].left:
                self._wait_for_result()
            self._batches.popleft()
            self._fill_window()
            self._advance(self._trainer.handling_s)
            handed.append(self._now)
            self._advance(self._trainer.step_s)
        return SimulatedEpoch(handed_out_s=handed, busy_s=self._busy_s, samples=self._samples_made)

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────────

    def _fill_window(self) -> None:
        rows = self._trainer.batch_size
        while len(self._batches) < self._dispatch.window():
            batch = _Batch()
            self._batches.append(batch)
            self._submit(batch, rows)

    def _submit(self, batch: _Batch, rows: int) -> None:
        trainer = self._trainer
        work_s = trainer.task_s + trainer.round_trip_s + rows * trainer.row_s + self._samples_s(rows)
        batch.left += 1
        self._queue.append(_Task(batch=batch, rows=rows, work_s=work_s, link_s=rows * trainer.link_s))
        self._start_tasks(self._now)

    def _samples_s(self, rows: int) -> float:
        """Return the time of the next `rows` samples."""
        period = len(self._sums) - 1
        first, self._rows_sent = self._rows_sent, self._rows_sent + rows
        rounds = self._rows_sent // period - first // period
        return rounds * self._sums[-1] + self._sums[self._rows_sent % period] - self._sums[first % period]

    def _wait_for_result(self) -> None:
        idle = max(0, self._trainer.workers - sum(batch.left for batch in self._batches))
        began = self._now
        while not self._results:
            self._now = max(self._now, self._next_event())
        if idle:
            self._dispatch.starved(round((self._now - began) * 1e9) * idle)
        while self._results:
            batch = self._take_result(self._results.popleft())
            if not batch.left:
                self._dispatch.learn(round(batch.work_s * 1e9))

    def _take_result(self, task: _Task) -> _Batch:
        self._advance(self._trainer.result_s)
        task.batch.left -= 1
        task.batch.work_s += task.work_s - self._trainer.task_s
        return task.batch

    # ── the workers, and the link ───────────────────────────────────────────────────────────────────────────

    def _advance(self, seconds: float) -> None:
        """Advance the loop's time; workers continue meanwhile."""
        self._now += seconds
        while self._events and self._events[0][0] <= self._now:
            self._next_event()

    def _next_event(self) -> float:
        """Process the next event, and return its time."""
        when, _, has_crossed_link, task = heapq.heappop(self._events)
        if not has_crossed_link:
            self._busy_s += task.work_s
            self._link_free_s = max(self._link_free_s, when) + task.link_s
            self._schedule(self._link_free_s if task.link_s else when, task, has_crossed_link=True)
            return when
        self._samples_made += task.rows
        self._free += 1
        self._results.append(task)
        self._start_tasks(when)
        return when

    def _start_tasks(self, when: float) -> None:
        while self._free and self._queue:
            self._free -= 1
            task = self._queue.popleft()
            self._schedule(when + task.work_s, task, has_crossed_link=False)

    def _schedule(self, when: float, task: _Task, *, has_crossed_link: bool) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, has_crossed_link, task))
