"""How many workers there should be: a rule from what batches show to a number, without a clock or a process of its own.

    too few    the step waited for more than 5 % of the time  ▶ as many as the work of a batch fills the loop's time
    no use     there are more, and together they make no more ▶ back to fewer; tried again after a while, ever longer
    too many   fewer would do, with a quarter to spare        ▶ fewer, when it has been so for eight batches
    tiny       making a batch takes less than fetching it     ▶ none: the training process makes its batches itself

The aim is a step that does not wait, not a loader that is fast: what a step hides costs nothing, and a worker that is
not needed costs a core and its memory.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

STALLED = 0.05
"""The share of the time that a step may wait before more workers are thought of."""

_SPARE = 1.25
"""Fewer workers must be enough for so many times the work, lest they soon be too few."""

_WINDOW = 8
_FEWEST = 3
_START_NS = 20_000_000
"""What it takes to start a worker (fork); the step must have waited as long since the last change."""

_OFTEN_NS = 2_000_000
"""Laps are weighed no more often: it takes about 10 µs, which would show in tiny batches."""

_USEFUL = 1.05
"""More workers stay when together they make so many times what fewer did."""

_JUDGED = 4
_CHANGED = 1.5
_PATIENCE = 64
_MOST_PATIENCE = 4096
_TINY = 0.8
_NO_LONGER_TINY = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Lap:
    """What one batch showed, from one batch's being handed out to the next one's."""

    number: int
    """The batch's place in its epoch."""

    step_ns: int
    """The program's own step."""

    handling_ns: int
    """In the training process: giving out work, taking in batches."""

    wait_ns: int
    """The step waited."""

    work_ns: int
    """Making the batch, summed over its workers."""


class Regulator:
    """Says how many workers there should be; told of every batch. Lives as long as its loader.

    Args:
        workers: how many there are at first.
        most: how many there may be.
        fixed: how many there are in the first epoch in which the number must not change.

    Example:
        >>> regulator = Regulator(workers=1, most=4, fixed=3)
        >>> lap = dict(step_ns=20_000_000, handling_ns=0, wait_ns=40_000_000, work_ns=60_000_000)
        >>> [regulator.observe(Lap(number=number, **lap)) for number in range(4)]
        [1, 1, 3, 3]
    """

    def __init__(self, *, workers: int, most: int, fixed: int) -> None:
        self.workers = workers
        self.most = most
        self.fixed = fixed
        self.least = 0
        self.fixed_reason = "a guess, before the first epoch has shown what is needed"
        self.reason = "to begin with"
        self._laps: deque[Lap] = deque(maxlen=_WINDOW)
        self._counts_from = 0
        self._lost_ns = 0
        self._unweighed_ns = (0, 0)
        """What has passed, and what was waited, since the laps were weighed last."""
        self._handling_ns: float | None = None
        self._before: tuple[int, float] | None = None
        """While more workers are on trial: how many there were, and how many batches they made in a nanosecond."""
        self._ceiling = most
        self._ceiling_for = 0
        self._ceiling_work_ns = 0.0
        """The work of a batch when the ceiling was found; with other work it is another question."""
        self._patience = _PATIENCE
        self._calm_for = 0
        self._calm_wanted = _WINDOW
        self._since_fewer = _MOST_PATIENCE
        self._totals = [0, 0, 0, 0]
        """Of an epoch with a fixed number: laps, the loop's own time, waiting, work."""

    # ── while the number may change ─────────────────────────────────────────────────────────────────────────

    def begin(self, number: int) -> None:
        """Count batches from `number` on: earlier ones were made by another crew, or at an epoch's start."""
        self._counts_from = number
        self._laps.clear()
        self._lost_ns = 0
        self._unweighed_ns = (0, 0)

    def observe(self, lap: Lap) -> int:
        """Take note of a batch; return how many workers there should be now."""
        if lap.number < self._counts_from:
            return self.workers
        self._laps.append(lap)
        self._since_fewer += 1
        self._tick_ceiling()
        passed_ns, waited_ns = self._unweighed_ns
        self._unweighed_ns = (passed_ns + lap.step_ns + lap.handling_ns + lap.wait_ns, waited_ns + lap.wait_ns)
        if len(self._laps) >= _FEWEST and self._unweighed_ns[0] >= _OFTEN_NS:
            if self.workers and len(self._laps) == _WINDOW:
                self._handling_ns = statistics.median(one.handling_ns for one in self._laps)
            self._weigh(_Seen(self._laps))
        return self.workers

    def insist(self) -> None:
        """Have at least one worker from now on."""
        self.least = 1
        if self.workers == 0:
            self._change(1, "a worker has died, and what kills a worker must not be made in the training process")

    def limit(self, most: int, reason: str) -> None:
        """Have no more than `most` workers from now on: the system gives no more."""
        self.most = self._ceiling = most
        self._before = None
        self._change(most, reason)

    def _weigh(self, seen: _Seen) -> None:
        self._lost_ns = self._lost_ns + self._unweighed_ns[1] if seen.stalled > STALLED else 0
        self._unweighed_ns = (0, 0)
        if self._before is not None and (len(self._laps) < _JUDGED or not self._is_worth_it(seen, *self._before)):
            return
        if self._is_tiny(seen):
            self._change(0, f"making a batch takes {_ms(seen.typical_ns)}, fetching it {_ms(self._handling_ns or 0)}")
        elif seen.stalled > STALLED:
            self._calm_for = 0
            self._consider_more(seen)
        elif len(self._laps) == _WINDOW and self.workers > 1:
            self._consider_fewer(seen)

    def _consider_more(self, seen: _Seen) -> None:
        if not 1 / _CHANGED < seen.typical_ns / max(1.0, self._ceiling_work_ns) < _CHANGED:
            self._ceiling = self.most
        if self._lost_ns < _START_NS or self.workers >= self._ceiling:
            return
        handling = self._handling_ns or 0.0
        if self.workers == 0 and seen.typical_ns < _NO_LONGER_TINY * handling:
            return
        if self._since_fewer < 4 * self._calm_wanted:
            self._calm_wanted = min(_MOST_PATIENCE, 2 * self._calm_wanted)
        if self.workers:
            # The dearest of them: when costs have just risen, the others tell of a time that is over.
            dearest_ns = max(lap.work_ns for lap in [*self._laps][-_FEWEST:])
            self._before = (self.workers, self.workers / max(1, dearest_ns))
        wanted = min(self._ceiling, max(self.workers + 1, math.ceil(seen.needed)))
        self._change(wanted, f"the step waited {seen.stalled:.0%} of the time for {self._crew()}")

    def _consider_fewer(self, seen: _Seen) -> None:
        enough = max(1, self.least, math.ceil(_SPARE * seen.needed))
        if enough >= self.workers:
            self._calm_for = 0
            return
        self._calm_for += 1
        if self._calm_for >= self._calm_wanted - _WINDOW + 1:
            self._since_fewer = 0
            self._change(enough, f"the work of a batch fills {seen.needed:.1f} workers while the step runs")

    def _is_worth_it(self, seen: _Seen, fewer: int, capacity: float) -> bool:
        """Keep more workers if they make more: a disk, a lock or the cores may be what there is too little of."""
        self._before = None
        if self.workers / max(1.0, seen.typical_ns) >= _USEFUL * capacity:
            self._patience = _PATIENCE
            return True
        more = self.workers
        self._ceiling, self._ceiling_for = fewer, self._patience
        self._ceiling_work_ns = fewer / capacity
        self._patience = min(_MOST_PATIENCE, 2 * self._patience)
        self._change(fewer, f"{more} made no more than {fewer}")
        return False

    def _is_tiny(self, seen: _Seen) -> bool:
        if self.workers == 0 or self.least or len(self._laps) < _WINDOW or self._handling_ns is None:
            return False
        return seen.typical_ns < _TINY * self._handling_ns

    def _tick_ceiling(self) -> None:
        self._ceiling_for -= 1
        if self._ceiling_for == 0:
            self._ceiling = self.most

    def _change(self, workers: int, reason: str) -> None:
        self.workers, self.reason = workers, reason
        self._laps.clear()
        self._lost_ns = self._calm_for = 0

    def _crew(self) -> str:
        return f"{self.workers} worker{'s' if self.workers > 1 else ''}" if self.workers else "batches made in between"

    # ── where the number is fixed for an epoch ──────────────────────────────────────────────────────────────

    def note(self, lap: Lap) -> None:
        """Take note of a batch of an epoch whose number is fixed."""
        for at, value in enumerate((1, lap.step_ns + lap.handling_ns, lap.wait_ns, lap.work_ns)):
            self._totals[at] += value

    def choose(self) -> int:
        """Return the number for an epoch in which it must not change, from what the last ones showed."""
        laps, loop_ns, wait_ns, work_ns = self._totals
        self._totals = [0, 0, 0, 0]
        if laps < _WINDOW:
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


class _Seen:
    """Some laps, summed up."""

    def __init__(self, laps: deque[Lap]) -> None:
        loop_ns = sum(lap.step_ns + lap.handling_ns for lap in laps)
        wait_ns = sum(lap.wait_ns for lap in laps)
        self.stalled = wait_ns / max(1, loop_ns + wait_ns)
        """The share of the time that the step waited."""
        self.needed = sum(lap.work_ns for lap in laps) / max(1, loop_ns)
        """How many workers the work fills, if the step never waits."""
        self.typical_ns = statistics.median(lap.work_ns for lap in laps)
        """The work of a batch; the median, for a few slow samples say nothing about what workers do to each other."""


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.2g} ms"
