"""How many workers there should be: a rule from the timing of batches to a number. It has no clock and no process.

    too few    the step waited for more than 5 % of the time  ▶ as many as the work of a batch fills the loop's time
    no use     there are more, and together they make no more ▶ back to fewer; tried again after a while, ever longer
    too many   fewer would do, with a quarter to spare        ▶ fewer, when it has been so for eight batches
    tiny       making a batch takes less than fetching it     ▶ none: the training process makes its batches itself

The aim is a step that does not wait, not a fast loader: loading that overlaps with the step costs nothing, and a worker
that is not needed costs a core and its memory.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

STALLED = 0.05
"""The fraction of the time that a step may wait before more workers are considered."""

_SPARE = 1.25
"""Fewer workers must be enough for this multiple of the work, so that they are not soon too few."""

_WINDOW = 8
"""How many batches are evaluated together, at most."""

_MIN_BATCHES = 3
"""How many are, at least."""

_START_NS = 20_000_000
"""The time to start a worker (fork); the step must have waited as long since the last change."""

_EVERY_NS = 2_000_000
"""Timings are evaluated no more often, because that takes about 10 µs, which would show in tiny batches."""

_USEFUL = 1.05
"""More workers stay if they make this multiple of the batches that fewer made."""

_TRIAL_BATCHES = 4
"""After how many batches more workers are judged."""

_COST_CHANGE = 1.5
"""The ratio by which the work of a batch must change before a number of workers that did not help is tried again."""

_RETRY_AFTER = 64
"""Otherwise it is tried again after this many batches, doubled every time it did not help ..."""

_MAX_RETRY_AFTER = 4096
"""... up to this."""

_TINY = 0.8
"""Workers are dropped when making a batch takes this multiple of what handling it takes, or less ..."""

_NO_LONGER_TINY = 1.5
"""... and started again above this multiple, so that the number does not oscillate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTiming:
    """Where the time went between one batch being handed out and the next."""

    number: int
    """The batch's position in its epoch."""

    step_ns: int
    """The program's own step."""

    handling_ns: int
    """The training process's own work: sending tasks, receiving batches."""

    wait_ns: int
    """How long the step waited."""

    work_ns: int
    """Making the batch, summed over its workers."""


class AutoscalePolicy:
    """Decides how many workers there should be, from the timing of every batch. Lives as long as its loader.

    Args:
        workers: how many there are at first.
        most: how many there may be.
        fixed: how many there are in the first epoch in which the number must not change.

    Example:
        >>> policy = AutoscalePolicy(workers=1, most=4, fixed=3)
        >>> times = dict(step_ns=20_000_000, handling_ns=0, wait_ns=40_000_000, work_ns=60_000_000)
        >>> [policy.observe(BatchTiming(number=number, **times)) for number in range(4)]
        [1, 1, 3, 3]
    """

    def __init__(self, *, workers: int, most: int, fixed: int) -> None:
        self.workers = workers
        self.most = most
        self.fixed = fixed
        self.least = 0
        self.fixed_reason = "a guess, before the first epoch has shown what is needed"
        self.reason = "to begin with"
        self._timings: deque[BatchTiming] = deque(maxlen=_WINDOW)
        self._counts_from = 0
        self._lost_ns = 0
        self._unevaluated_ns = (0, 0)
        """Time passed, and time waited, since the timings were evaluated last."""
        self._handling_ns: float | None = None
        self._before: tuple[int, float] | None = None
        """While more workers are on trial: how many there were, and how many batches they made in a nanosecond."""
        self._ceiling = most
        self._ceiling_for = 0
        self._ceiling_work_ns = 0.0
        """The work of a batch when the ceiling was found; with other work it is another question."""
        self._retry_after = _RETRY_AFTER
        self._calm_for = 0
        self._calm_wanted = _WINDOW
        self._since_fewer = _MAX_RETRY_AFTER
        self._totals = [0, 0, 0, 0]
        """Of an epoch with a fixed number: batches, the loop's own time, waiting, work."""

    # ── while the number may change ─────────────────────────────────────────────────────────────────────────

    def begin(self, number: int) -> None:
        """Count batches from `number` on: earlier ones were made by other workers, or at an epoch's start."""
        self._counts_from = number
        self._timings.clear()
        self._lost_ns = 0
        self._unevaluated_ns = (0, 0)

    def observe(self, timing: BatchTiming) -> int:
        """Record a batch; return how many workers there should be now."""
        if timing.number < self._counts_from:
            return self.workers
        self._timings.append(timing)
        self._since_fewer += 1
        self._tick_ceiling()
        passed_ns, waited_ns = self._unevaluated_ns
        self._unevaluated_ns = (
            passed_ns + timing.step_ns + timing.handling_ns + timing.wait_ns,
            waited_ns + timing.wait_ns,
        )
        if len(self._timings) >= _MIN_BATCHES and self._unevaluated_ns[0] >= _EVERY_NS:
            if self.workers and len(self._timings) == _WINDOW:
                self._handling_ns = statistics.median(one.handling_ns for one in self._timings)
            self._evaluate(_Summary(self._timings))
        return self.workers

    def require_worker(self) -> None:
        """Have at least one worker from now on."""
        self.least = 1
        if self.workers == 0:
            self._change(1, "a worker has crashed, and what crashes a worker must not be made in the training process")

    def limit(self, most: int, reason: str) -> None:
        """Have at most `most` workers from now on, because the system allows no more."""
        self.most = self._ceiling = most
        self._before = None
        self._change(most, reason)

    def _evaluate(self, summary: _Summary) -> None:
        self._lost_ns = self._lost_ns + self._unevaluated_ns[1] if summary.stalled > STALLED else 0
        self._unevaluated_ns = (0, 0)
        if self._before is not None and (
            len(self._timings) < _TRIAL_BATCHES or not self._is_worth_it(summary, *self._before)
        ):
            return
        if self._is_tiny(summary):
            self._change(
                0, f"making a batch takes {_ms(summary.typical_ns)}, fetching it {_ms(self._handling_ns or 0)}"
            )
        elif summary.stalled > STALLED:
            self._calm_for = 0
            self._consider_more(summary)
        elif len(self._timings) == _WINDOW and self.workers > 1:
            self._consider_fewer(summary)

    def _consider_more(self, summary: _Summary) -> None:
        if not 1 / _COST_CHANGE < summary.typical_ns / max(1.0, self._ceiling_work_ns) < _COST_CHANGE:
            self._ceiling = self.most
        if self._lost_ns < _START_NS or self.workers >= self._ceiling:
            return
        handling = self._handling_ns or 0.0
        if self.workers == 0 and summary.typical_ns < _NO_LONGER_TINY * handling:
            return
        if self._since_fewer < 4 * self._calm_wanted:
            self._calm_wanted = min(_MAX_RETRY_AFTER, 2 * self._calm_wanted)
        if self.workers:
            # The most expensive one: when costs have just risen, the others are out of date.
            highest_ns = max(timing.work_ns for timing in [*self._timings][-_MIN_BATCHES:])
            self._before = (self.workers, self.workers / max(1, highest_ns))
        wanted = min(self._ceiling, max(self.workers + 1, math.ceil(summary.needed)))
        self._change(wanted, f"the step waited {summary.stalled:.0%} of the time for {self._workers_text()}")

    def _consider_fewer(self, summary: _Summary) -> None:
        enough = max(1, self.least, math.ceil(_SPARE * summary.needed))
        if enough >= self.workers:
            self._calm_for = 0
            return
        self._calm_for += 1
        if self._calm_for >= self._calm_wanted - _WINDOW + 1:
            self._since_fewer = 0
            self._change(enough, f"the work of a batch fills {summary.needed:.1f} workers while the step runs")

    def _is_worth_it(self, summary: _Summary, fewer: int, capacity: float) -> bool:
        """Keep more workers if they make more; if not, a disk, a lock or the cores are the bottleneck."""
        self._before = None
        if self.workers / max(1.0, summary.typical_ns) >= _USEFUL * capacity:
            self._retry_after = _RETRY_AFTER
            return True
        more = self.workers
        self._ceiling, self._ceiling_for = fewer, self._retry_after
        self._ceiling_work_ns = fewer / capacity
        self._retry_after = min(_MAX_RETRY_AFTER, 2 * self._retry_after)
        self._change(fewer, f"{more} made no more than {fewer}")
        return False

    def _is_tiny(self, summary: _Summary) -> bool:
        if self.workers == 0 or self.least or len(self._timings) < _WINDOW or self._handling_ns is None:
            return False
        return summary.typical_ns < _TINY * self._handling_ns

    def _tick_ceiling(self) -> None:
        self._ceiling_for -= 1
        if self._ceiling_for == 0:
            self._ceiling = self.most

    def _change(self, workers: int, reason: str) -> None:
        self.workers, self.reason = workers, reason
        self._timings.clear()
        self._lost_ns = self._calm_for = 0

    def _workers_text(self) -> str:
        return (
            f"{self.workers} worker{'s' if self.workers > 1 else ''}"
            if self.workers
            else "batches made in the training process"
        )

    # ── where the number is fixed for an epoch ──────────────────────────────────────────────────────────────

    def note(self, timing: BatchTiming) -> None:
        """Record a batch of an epoch whose number of workers is fixed."""
        for at, value in enumerate((1, timing.step_ns + timing.handling_ns, timing.wait_ns, timing.work_ns)):
            self._totals[at] += value

    def choose(self) -> int:
        """Return the number of workers for an epoch in which it must not change, from the last epochs' timings."""
        batches, loop_ns, wait_ns, work_ns = self._totals
        self._totals = [0, 0, 0, 0]
        if batches < _WINDOW:
            return self.fixed
        needed, stalled = work_ns / max(1, loop_ns), wait_ns / max(1, wait_ns + loop_ns)
        enough = max(1, math.ceil(_SPARE * needed))
        if stalled > STALLED and self.fixed < self.most:
            self.fixed = min(self.most, max(self.fixed + 1, math.ceil(needed)))
            self.fixed_reason = f"the step waited {stalled:.0%} of the last epoch"
        elif stalled <= STALLED and enough < self.fixed:
            self.fixed = enough
            self.fixed_reason = f"the work of a batch filled {needed:.1f} workers in the last epoch"
        return self.fixed


class _Summary:
    """Some timings, summed up."""

    def __init__(self, timings: deque[BatchTiming]) -> None:
        loop_ns = sum(timing.step_ns + timing.handling_ns for timing in timings)
        wait_ns = sum(timing.wait_ns for timing in timings)
        self.stalled = wait_ns / max(1, loop_ns + wait_ns)
        """The fraction of the time that the step waited."""
        self.needed = sum(timing.work_ns for timing in timings) / max(1, loop_ns)
        """How many workers the work fills, if the step never waits."""
        self.typical_ns = statistics.median(timing.work_ns for timing in timings)
        """The median work of a batch, because a few slow samples do not show how workers affect each other."""


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.2g} ms"
