"""How many workers there should be, where the number may change at any batch: a rule from the timing of batches to a
number. It has no clock and no process. `epoch_policy` has the rule for epochs in which the number must not change.

    too few    the step waited for more than 5 % of the time  ▶ as many as the work of a batch fills the loop's time
    no use     there are more, and together they make no more ▶ back to fewer; tried again after a while, ever longer
    too many   fewer would do, with a quarter to spare        ▶ fewer, when it has been so for eight batches
    too hasty  beyond the cores, and half as many make as much, as is tried now and then ▶ half as many
    tiny       making a batch takes less than fetching it     ▶ none: the training process makes its batches itself

There are no more workers than cores, except where they wait (for a disk, a network) rather than compute: n workers that
compute a tenth of their time keep n / 10 cores busy.

The aim is a step that does not wait, not a fast loader: loading that overlaps with the step costs nothing, and a worker
that is not needed costs a core and its memory.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from penstock.loader.scheduling.epoch_policy import EpochPolicy
from penstock.loader.scheduling.worker_limits import (
    CLEARLY_USEFUL,
    COST_CHANGE,
    SPARE,
    STALLED,
    START_NS,
    TINY,
    USEFUL,
    WINDOW,
    BatchTiming,
    WorkerLimits,
    ms_text,
    totals_of,
    workers_text,
)
from penstock.loader.workers.busy_time import WAITING

_MIN_BATCHES = 3
"""How many batches are evaluated together, at least."""

_EVERY_NS = 2_000_000
"""Timings are evaluated no more often, because that takes about 10 µs, which would show in tiny batches."""

_AHEAD = 2
"""How many batches each worker may have made ahead (torch's default)."""

_TRIAL_BATCHES = 4
"""After how many batches more workers are judged; beyond the cores after one of each, by their mean: workers that wait
may wait for each other, and a lock lets some of them pass sooner."""

_CHECK_AFTER = 8
"""More workers than cores are checked after this many batches of each, and then ever more rarely: half of them work for
a while. What a few batches have shown of workers that wait for a lock may have been chance. A check costs the starts of
half of the workers, so it comes later where each makes nearly as much as one of fewer did."""

_SURER = 4
"""So many times later."""

_CLEARLY_LESS = 0.75
"""A check ends at once where half of the workers make less than this multiple: of those that do not wait for each other
they make half. And each of more workers makes nearly as much as one of fewer if it makes this multiple."""

_RETRY_AFTER = 64
"""More workers that did not help are tried again after this many batches, doubled every time they did not help ..."""

_MAX_RETRY_AFTER = 4096
"""... up to this."""

_NO_LONGER_TINY = 1.5
"""Workers that were dropped at `TINY` are started again above this multiple, so that the number does not oscillate."""

_TO_BEGIN_WITH = 2
"""So few workers are more after their first batch, if it has waited."""


class AutoscalePolicy:
    """Decides how many workers there should be, from the timing of every batch. Lives as long as its loader.

    Args:
        workers: how many there are at first.
        most: how many there may be.
        fixed: how many there are in the first epoch in which the number must not change.
        most_waiting: how many there may be where they wait rather than compute; as `most`, if left out.

    Example:
        >>> policy = AutoscalePolicy(workers=1, most=4, fixed=3)
        >>> times = dict(step_ns=20_000_000, handling_ns=0, wait_ns=40_000_000, work_ns=60_000_000)
        >>> [policy.observe(BatchTiming(number=number, **times)) for number in range(4)]
        [1, 1, 3, 3]
    """

    def __init__(self, *, workers: int, most: int, fixed: int, most_waiting: int | None = None) -> None:
        self.workers = workers
        self.limits = WorkerLimits(most=most, most_waiting=most if most_waiting is None else most_waiting)
        self.epochs = EpochPolicy(self.limits, fixed)
        """Decides in their place for epochs in which the number must not change."""
        self.asked: int | None = None
        """The number that a script has asked for, where this policy takes its place."""
        self.reason = "to begin with"
        self._timings: deque[BatchTiming] = deque(maxlen=WINDOW)
        self._recent_ns: deque[int] = deque(maxlen=max(WINDOW, self.limits.most_waiting))
        """The work of more batches than `_timings`, one of each worker at least."""
        self._counts_from = 0
        self._lost_ns = 0
        self._unevaluated_ns = (0, 0)
        """Time passed, and time waited, since the timings were evaluated last."""
        self._handling_ns: float | None = None
        self._before: tuple[int, float, float] | None = None
        """While more workers are on trial: how many there were, how many batches they made in a nanosecond, and which
        multiple of those more must make to stay."""
        self._trial_ns: list[int] = []
        """The work of each batch that they have made."""
        self._checked: tuple[int, float, str] | None = None
        """While half of the workers are on trial: how many there were, how many batches they made in a nanosecond, and
        the reason for their number."""
        self._check_in = self._check_after = 0
        """After how many batches there is a check, and how many there are between two."""
        self._ceiling = self.limits.most_waiting
        self._ceiling_for = 0
        self._ceiling_work_ns = 0, 0.0
        """The workers that were kept when the ceiling was found, and the work of their batches; with other work it is
        another question. Other numbers of workers have other work where they wait for each other."""
        self._retry_after = _RETRY_AFTER
        self._calm_for = 0
        self._calm_wanted = WINDOW
        self._since_fewer = _MAX_RETRY_AFTER

    def begin(self, number: int) -> None:
        """Count batches from `number` on: earlier ones were made by other workers, or at an epoch's start."""
        self._counts_from = number
        self._timings.clear()
        self._recent_ns.clear()
        self._trial_ns.clear()
        self._lost_ns = 0
        self._unevaluated_ns = (0, 0)

    def observe(self, timing: BatchTiming) -> int:
        """Record a batch; return how many workers there should be now."""
        if timing.number < self._counts_from:
            return self.workers
        self._timings.append(timing)
        self._recent_ns.append(max(1, timing.work_ns))
        if self._before is not None or self._checked is not None:
            self._trial_ns.append(timing.work_ns)
        self._since_fewer += 1
        self._check_in -= 1
        self._tick_ceiling()
        passed_ns, waited_ns = self._unevaluated_ns
        self._unevaluated_ns = (
            passed_ns + timing.step_ns + timing.handling_ns + timing.wait_ns,
            waited_ns + timing.wait_ns,
        )
        least = 1 if self.workers <= _TO_BEGIN_WITH and _waits_long(timing) else _MIN_BATCHES
        if len(self._timings) >= least and self._unevaluated_ns[0] >= _EVERY_NS:
            if self.workers and len(self._timings) == WINDOW:
                self._handling_ns = statistics.median(one.handling_ns for one in self._timings)
            self._evaluate(_Summary(self._timings))
        return self.workers

    def observe_first(self, timing: BatchTiming) -> int:
        """Record an epoch's first batch, before which nothing was under way: it tells only whether few workers wait.

        So do the others that are the first of a worker, which computes more with it than with later ones.
        """
        if self.workers > _TO_BEGIN_WITH or not _waits_long(timing):
            self.begin(timing.number + max(1, self.workers))
            return self.workers
        self.begin(timing.number)
        return self.observe(timing)

    def choose(self) -> int:
        """Return the number of workers for an epoch in which it must not change."""
        return self.epochs.choose()

    def require_worker(self) -> None:
        """Have at least one worker from now on."""
        self.limits.least = 1
        if self.workers == 0:
            self._change(1, "a worker has crashed, and what crashes a worker must not be made in the training process")

    def limit(self, most: int, reason: str) -> None:
        """Have at most `most` workers from now on, because the system allows no more."""
        self.limits.most = self.limits.most_waiting = self._ceiling = most
        self._before = self._checked = None
        self._change(most, reason)

    def _evaluate(self, summary: _Summary) -> None:
        self._lost_ns = self._lost_ns + self._unevaluated_ns[1] if summary.stalled > STALLED else 0
        self._unevaluated_ns = (0, 0)
        if self._before is not None and not self._is_worth_it(summary, *self._before):
            return
        if self._checked is not None:
            self._end_check(summary, *self._checked)
            return
        if self._is_tiny(summary):
            self._change(
                0,
                f"making a batch takes {ms_text(summary.typical_ns)}, fetching it {ms_text(self._handling_ns or 0)}",
            )
        elif self.workers > 2 * self.limits.allowed(summary.busy):
            if len(self._recent_ns) >= self.workers:
                self._change(self.limits.allowed(summary.busy), "they compute, and have waited before")
        elif summary.stalled > STALLED:
            self._calm_for = 0
            if self.workers > self.limits.most and self._check_in <= 0 and len(self._recent_ns) >= self.workers:
                self._checked = self.workers, self.workers / statistics.mean(self._recent_ns), self.reason
                self._change(max(self.limits.most, self.workers // 2), "trying whether fewer make as much")
            else:
                self._consider_more(summary)
        elif len(self._timings) == WINDOW and self.workers > 1:
            self._consider_fewer(summary)

    def _consider_more(self, summary: _Summary) -> None:
        kept, kept_ns = self._ceiling_work_ns
        if self.workers == kept and not 1 / COST_CHANGE < summary.typical_ns / max(1.0, kept_ns) < COST_CHANGE:
            self._ceiling, self._retry_after = self.limits.most_waiting, _RETRY_AFTER
        ceiling = min(self._ceiling, self.limits.allowed(summary.busy))
        if self._lost_ns < START_NS or ceiling < self.workers + max(1, self.workers // 8):
            return
        handling = self._handling_ns or 0.0
        if self.workers == 0 and summary.typical_ns < _NO_LONGER_TINY * handling:
            return
        if self._since_fewer < 4 * self._calm_wanted:
            self._calm_wanted = min(_MAX_RETRY_AFTER, 2 * self._calm_wanted)
        if self.workers:
            work_ns = [timing.work_ns for timing in self._timings]
            # The most expensive one: when costs have just risen, the others are out of date. Of workers that wait for
            # each other, some batches always take longer.
            typical_ns = max(work_ns[-_MIN_BATCHES:]) if self.workers <= self.limits.most else statistics.mean(work_ns)
            gain = USEFUL if len(work_ns) >= _MIN_BATCHES else CLEARLY_USEFUL
            self._before = self.workers, self.workers / max(1, typical_ns), gain
        has_failed = self._retry_after > _RETRY_AFTER  # what more workers wait for may be each other, so one will show
        few = self.workers + max(1, self.workers // 4)
        wanted = min(ceiling, few if has_failed else max(self.workers + 1, math.ceil(summary.needed)))
        self._change(wanted, f"the step waited {summary.stalled:.0%} of the time for {workers_text(self.workers)}")

    def _consider_fewer(self, summary: _Summary) -> None:
        enough = max(1, self.limits.least, math.ceil(SPARE * summary.needed))
        if enough >= self.workers:
            self._calm_for = 0
            return
        self._calm_for += 1
        # For so many batches the loop may only use up what more workers than needed have made ahead.
        if self._calm_for >= max(self._calm_wanted, _AHEAD * self.workers) - WINDOW + 1:
            self._since_fewer = 0
            self._change(enough, f"the work of a batch fills {summary.needed:.1f} workers while the step runs")

    def _is_worth_it(self, summary: _Summary, fewer: int, capacity: float, gain: float) -> bool:
        """Keep more workers if they make more; if not, or not yet known, return False.

        If not, a disk, a lock or the cores are the bottleneck.
        """
        waits = self.workers > self.limits.most
        if len(self._trial_ns) < max(_TRIAL_BATCHES, self.workers if waits else 0):
            return False
        work_ns = statistics.mean(self._trial_ns) if waits else summary.typical_ns
        self._before = None
        if self.workers / max(1.0, work_ns) >= gain * capacity:
            self._retry_after = _RETRY_AFTER
            is_linear = work_ns * _CLEARLY_LESS <= fewer / capacity
            self._check_in = self._check_after = _CHECK_AFTER * self.workers * (_SURER if is_linear else 1)
            return True
        self._go_back(fewer, capacity)
        return False

    def _go_back(self, fewer: int, rate: float) -> None:
        """Have fewer workers, which made so many batches in a nanosecond, and more again only after a while."""
        self._ceiling, self._ceiling_for = fewer, self._retry_after
        self._ceiling_work_ns = fewer, fewer / rate
        self._retry_after = min(_MAX_RETRY_AFTER, 2 * self._retry_after)
        self._change(fewer, f"{self._checked[0] if self._checked else self.workers} made no more than {fewer}")

    def _end_check(self, summary: _Summary, more: int, rate_more: float, reason: str) -> None:
        """Return to `more` workers if they make more than those on trial; if it is not yet known, do nothing."""
        rate = self.workers / max(1.0, statistics.mean(self._trial_ns))
        is_less = rate * USEFUL < rate_more and summary.stalled > STALLED
        if len(self._trial_ns) < (_TRIAL_BATCHES if rate < _CLEARLY_LESS * rate_more else self.workers):
            return
        if is_less:
            self._check_in = self._check_after = min(_MAX_RETRY_AFTER, 2 * self._check_after)
            self._change(more, reason)
        else:
            self._check_in = self._check_after = _CHECK_AFTER * self.workers
            self._go_back(self.workers, rate)
        self._checked = None

    def _is_tiny(self, summary: _Summary) -> bool:
        if self.workers == 0 or self.limits.least or self.limits.has_effects:
            return False
        if len(self._timings) < WINDOW or self._handling_ns is None:
            return False
        return summary.typical_ns < TINY * self._handling_ns

    def _tick_ceiling(self) -> None:
        self._ceiling_for -= 1
        if self._ceiling_for == 0:
            self._ceiling = self.limits.most_waiting

    def _change(self, workers: int, reason: str) -> None:
        self.workers, self.reason = workers, reason
        self._timings.clear()
        self._recent_ns.clear()
        self._trial_ns.clear()
        self._lost_ns = self._calm_for = 0


class _Summary:
    """Some timings, summed up."""

    def __init__(self, timings: deque[BatchTiming]) -> None:
        loop_ns = sum(timing.step_ns + timing.handling_ns for timing in timings)
        wait_ns = sum(timing.wait_ns for timing in timings)
        self.stalled = wait_ns / max(1, loop_ns + wait_ns)
        """The fraction of the time that the step waited."""
        self.needed = sum(timing.work_ns for timing in timings) / max(1, loop_ns)
        """How many workers the work fills, if the step never waits."""
        self.busy = statistics.median_high(totals_of(timing)[-1] / max(1, timing.work_ns) for timing in timings)
        """The fraction of the work that is not waiting, of a typical batch: a page that the system has to find, or a
        core that another machine takes, may be most of one batch's work."""
        self.typical_ns = statistics.median(timing.work_ns for timing in timings)
        """The median work of a batch, because a few slow samples do not show how workers affect each other."""


def _waits_long(timing: BatchTiming) -> bool:
    """Return whether one batch is enough to see that more workers pay: it has waited, for longer than one's start."""
    *_, work_ns, busy_ns = totals_of(timing)
    return work_ns >= START_NS and busy_ns < WAITING * work_ns
