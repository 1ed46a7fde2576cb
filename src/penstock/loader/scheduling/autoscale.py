"""How many workers there should be: a rule from the timing of batches to a number. It has no clock and no process.

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
from dataclasses import dataclass

from penstock.loader.workers.busy_time import WAITING, useful_workers

STALLED = 0.05
"""The fraction of the time that a step may wait before more workers are considered."""

_SPARE = 1.25
"""Fewer workers must be enough for this multiple of the work, so that they are not soon too few."""

_WINDOW = 8
"""How many batches are evaluated together, at most."""

_MIN_BATCHES = 3
"""How many are, at least."""

START_NS = 20_000_000
"""The time to start a worker (fork), until it is measured; the step must have waited as long since the last change."""

_EVERY_NS = 2_000_000
"""Timings are evaluated no more often, because that takes about 10 µs, which would show in tiny batches."""

_USEFUL = 1.05
"""More workers stay if they make this multiple of the batches that fewer made."""

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

_CLEARLY_USEFUL = 1.5
"""More than there are cores, for what one batch has shown, stay if they make this multiple of what that promised for
fewer: the first batch of a worker takes longer than the next ones."""

_RETRY_EPOCHS = 8
"""A fixed number that did not help is tried again after so many epochs, doubled every time it did not help."""

_FIRST_BUSY_NS = 2_000_000
"""How long a worker computes with its first batch beside making it: it writes to its pages for the first time. Measured
on samples that sleep: 3 to 5 ms in all, and 1 to 3 ms with later batches. It is left out of batches that take as long
as a worker's start."""

_LIFETIME_EPOCHS = 10
"""For how many epochs workers that persist are thought to make batches, when it is chosen how many are started."""

_UNKNOWN_LENGTH = 100
"""How many batches an epoch is thought to have where nobody knows."""

_TO_BEGIN_WITH = 2
"""So few workers are more after their first batch, if it has waited."""

_GUESS = "a guess, before the first epoch has shown what is needed"


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

    busy_ns: int | None = None
    """How much of the work was computing rather than waiting. None: all of it."""


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
        self.most = most
        self.most_waiting = most if most_waiting is None else most_waiting
        self.fixed = self._guessed = fixed
        self.least = 0
        self.asked: int | None = None
        """The number that a script has asked for, where this policy takes its place."""
        self.is_persistent = False
        """Whether a fixed number stays for all epochs, because its workers do."""
        self.fixed_reason = _GUESS
        self.has_effects = False
        """Whether it would be noticed if the training process made the samples; see `lasting_effects`."""
        self.start_ns = START_NS
        """How long the start of a worker takes, as far as it is known."""
        self.reason = "to begin with"
        self._timings: deque[BatchTiming] = deque(maxlen=_WINDOW)
        self._recent_ns: deque[int] = deque(maxlen=max(_WINDOW, self.most_waiting))
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
        self._ceiling = self.most_waiting
        self._ceiling_for = 0
        self._ceiling_work_ns = 0, 0.0
        """The workers that were kept when the ceiling was found, and the work of their batches; with other work it is
        another question. Other numbers of workers have other work where they wait for each other."""
        self._retry_after = _RETRY_AFTER
        self._calm_for = 0
        self._calm_wanted = _WINDOW
        self._since_fewer = _MAX_RETRY_AFTER
        self._totals = [0] * 6
        """Of an epoch with a fixed number: batches, step, handling, waiting, work, busy."""
        self._fixed_before: tuple[int, float, float] | None = None
        """While a fixed number is on trial: the one before, its batches per nanosecond, and which multiple of those
        the new one must make to stay."""
        self._fixed_ceiling: int | None = None
        """What was best when more did not help."""
        self._fixed_ceiling_for = 0
        self._fixed_ceiling_work_ns = 0.0
        """What so many workers had to do for a batch; 0 before they were measured. With other work it is another
        question."""
        self._enough_before = 0
        """What would have been enough in the epoch before the last one."""
        self._retry_epochs = _RETRY_EPOCHS

    # ── while the number may change ─────────────────────────────────────────────────────────────────────────

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
            if self.workers and len(self._timings) == _WINDOW:
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

    def require_worker(self) -> None:
        """Have at least one worker from now on."""
        self.least = 1
        if self.workers == 0:
            self._change(1, "a worker has crashed, and what crashes a worker must not be made in the training process")

    def limit(self, most: int, reason: str) -> None:
        """Have at most `most` workers from now on, because the system allows no more."""
        self.most = self.most_waiting = self._ceiling = most
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
                0, f"making a batch takes {_ms(summary.typical_ns)}, fetching it {_ms(self._handling_ns or 0)}"
            )
        elif self.workers > 2 * self._allowed(summary.busy):
            if len(self._recent_ns) >= self.workers:
                self._change(self._allowed(summary.busy), "they compute, and have waited before")
        elif summary.stalled > STALLED:
            self._calm_for = 0
            if self.workers > self.most and self._check_in <= 0 and len(self._recent_ns) >= self.workers:
                self._checked = self.workers, self.workers / statistics.mean(self._recent_ns), self.reason
                self._change(max(self.most, self.workers // 2), "trying whether fewer make as much")
            else:
                self._consider_more(summary)
        elif len(self._timings) == _WINDOW and self.workers > 1:
            self._consider_fewer(summary)

    def _consider_more(self, summary: _Summary) -> None:
        kept, kept_ns = self._ceiling_work_ns
        if self.workers == kept and not 1 / _COST_CHANGE < summary.typical_ns / max(1.0, kept_ns) < _COST_CHANGE:
            self._ceiling, self._retry_after = self.most_waiting, _RETRY_AFTER
        ceiling = min(self._ceiling, self._allowed(summary.busy))
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
            typical_ns = max(work_ns[-_MIN_BATCHES:]) if self.workers <= self.most else statistics.mean(work_ns)
            gain = _USEFUL if len(work_ns) >= _MIN_BATCHES else _CLEARLY_USEFUL
            self._before = self.workers, self.workers / max(1, typical_ns), gain
        has_failed = self._retry_after > _RETRY_AFTER  # what more workers wait for may be each other, so one will show
        few = self.workers + max(1, self.workers // 4)
        wanted = min(ceiling, few if has_failed else max(self.workers + 1, math.ceil(summary.needed)))
        self._change(wanted, f"the step waited {summary.stalled:.0%} of the time for {_workers_text(self.workers)}")

    def _consider_fewer(self, summary: _Summary) -> None:
        enough = max(1, self.least, math.ceil(_SPARE * summary.needed))
        if enough >= self.workers:
            self._calm_for = 0
            return
        self._calm_for += 1
        # For so many batches the loop may only use up what more workers than needed have made ahead.
        if self._calm_for >= max(self._calm_wanted, _AHEAD * self.workers) - _WINDOW + 1:
            self._since_fewer = 0
            self._change(enough, f"the work of a batch fills {summary.needed:.1f} workers while the step runs")

    def _is_worth_it(self, summary: _Summary, fewer: int, capacity: float, gain: float) -> bool:
        """Keep more workers if they make more; if not, or not yet known, return False.

        If not, a disk, a lock or the cores are the bottleneck.
        """
        waits = self.workers > self.most
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
        is_less = rate * _USEFUL < rate_more and summary.stalled > STALLED
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
        if self.workers == 0 or self.least or self.has_effects:
            return False
        if len(self._timings) < _WINDOW or self._handling_ns is None:
            return False
        return summary.typical_ns < _TINY * self._handling_ns

    def _allowed(self, busy: float) -> int:
        """Return how many workers there may be that are busy for this fraction of the time that they take.

        Of those that mostly wait twice as many beside the cores' own: they wait when they please, and with just as many
        a core has often nothing to do.
        """
        useful = useful_workers(self.most, busy)
        return max(self.most, min(self.most_waiting, 2 * useful - self.most if busy <= WAITING else useful))

    def _tick_ceiling(self) -> None:
        self._ceiling_for -= 1
        if self._ceiling_for == 0:
            self._ceiling = self.most_waiting

    def _change(self, workers: int, reason: str) -> None:
        self.workers, self.reason = workers, reason
        self._timings.clear()
        self._recent_ns.clear()
        self._trial_ns.clear()
        self._lost_ns = self._calm_for = 0

    # ── where the number is fixed for an epoch ──────────────────────────────────────────────────────────────

    @property
    def is_guess(self) -> bool:
        """Whether nothing has been measured yet that would tell what the fixed number should be."""
        return self.fixed_reason == _GUESS

    def plan_first(self, work_ns: int, busy_ns: int, *, batches: int | None, most: int) -> None:
        """Choose the number for the first epoch from its first batch: many more than the guess only if it has waited.

        It is chosen again when it is known how long the start of a worker takes.

        Args:
            work_ns: how long the batch took.
            busy_ns: how much of that was computing.
            batches: of the epoch; None where nobody knows.
            most: how many workers the memory holds.
        """
        beside_ns = min(busy_ns, _FIRST_BUSY_NS) if work_ns >= START_NS else 0
        busy = (busy_ns - beside_ns) / max(1, work_ns - beside_ns)
        guess, waits, epochs = self._guessed, busy <= WAITING, _LIFETIME_EPOCHS if self.is_persistent else 1
        allowed = self._allowed(busy) if waits else self.most
        known = _UNKNOWN_LENGTH if batches is None else batches
        workers = _worth_starting(min(allowed, most), known, work_ns, self.start_ns, epochs)
        if not waits:
            self.fixed = max(guess, workers)
            self.fixed_reason = f"a guess: the first batch computed for {busy:.0%} of its time"
            return
        self.most_waiting = max(self.most, min(self.most_waiting, most))
        if workers <= guess:
            self.fixed, self._fixed_before = guess, None
            self.fixed_reason = "a guess: more would not pay for the time that it takes to start them"
            return
        self._fixed_before = guess, guess / max(1, work_ns), _CLEARLY_USEFUL
        self.fixed, self.fixed_reason = workers, f"the first batch waited for {1 - busy:.0%} of its time"

    def note(self, timing: BatchTiming) -> None:
        """Record a batch of an epoch whose number of workers is fixed."""
        for at, value in enumerate(_totals_of(timing)):
            self._totals[at] += value

    def why_no_workers(self) -> str:
        """Return why the training process is to make the batches of all later epochs; an empty string if it is not.

        The last epoch's would have taken it clearly less time than it spent on fetching them, and more workers could
        not have helped: there were as many as cores, or fetching alone took longer. There is no way back, because
        workers that are forked later would share the files that the dataset opens here.
        """
        batches, step_ns, handling_ns, wait_ns, work_ns, _ = self._totals
        if batches < _WINDOW or self.is_persistent or self.least or self.has_effects:
            return ""
        loop_ns, alone_ns = step_ns + handling_ns + wait_ns, step_ns + work_ns
        if alone_ns >= _TINY * loop_ns or (self.fixed < self.most and work_ns >= _TINY * handling_ns):
            return ""
        return (
            f"making a batch takes {_ms(work_ns / batches)}, and with {_workers_text(self.fixed)} the loop took "
            f"{_ms(loop_ns / batches)} for each, {_ms(step_ns / batches)} of it its step"
        )

    def choose(self) -> int:
        """Return the number of workers for an epoch in which it must not change, from the last epochs' timings."""
        batches, step_ns, handling_ns, wait_ns, work_ns, busy_ns = self._totals
        self._totals = [0] * 6
        if batches < _WINDOW:
            return self.fixed
        loop_ns = step_ns + handling_ns
        rate = batches / max(1, loop_ns + wait_ns)
        needed, stalled = work_ns / max(1, loop_ns), wait_ns / max(1, wait_ns + loop_ns)
        enough = max(1, math.ceil(_SPARE * needed))
        # Epochs may cost different amounts: fewer workers have to have been enough for two of them.
        enough, self._enough_before = max(enough, self._enough_before), enough
        if self._fixed_before is not None and not self._fixed_stays(rate, stalled, *self._fixed_before):
            return self.fixed
        worth = _worth_starting(self._allowed(busy_ns / max(1, work_ns)), batches, work_ns / batches, self.start_ns)
        most = min(max(self.most, worth), self._fixed_ceiling_at(work_ns / batches))
        if stalled > STALLED and self.fixed < most:
            before = self.fixed
            has_failed = self._retry_epochs > _RETRY_EPOCHS
            self.fixed = min(most, before + max(1, before // 4) if has_failed else max(before + 1, math.ceil(needed)))
            self._fixed_before = before, rate, _USEFUL
            self.fixed_reason = f"the step waited {stalled:.0%} of the last epoch"
        elif stalled <= STALLED and enough < self.fixed:
            self.fixed = enough
            self.fixed_reason = f"the work of a batch filled {needed:.1f} workers in the last epoch"
        return self.fixed

    def _fixed_ceiling_at(self, work_ns: float) -> int:
        """Return how many workers there may be at most where a batch takes so much work; count an epoch."""
        if self._fixed_ceiling is None:
            return self.most_waiting
        if self.fixed == self._fixed_ceiling:
            self._fixed_ceiling_work_ns = known_ns = self._fixed_ceiling_work_ns or max(1.0, work_ns)
            if not 1 / _COST_CHANGE < work_ns / known_ns < _COST_CHANGE:
                self._lift_fixed_ceiling()
                return self.most_waiting
        ceiling = self._fixed_ceiling
        self._fixed_ceiling_for -= 1
        if self._fixed_ceiling_for == 0:
            self._fixed_ceiling = None
        return ceiling

    def _lift_fixed_ceiling(self) -> None:
        self._fixed_ceiling, self._retry_epochs = None, _RETRY_EPOCHS

    def _fixed_stays(self, rate: float, stalled: float, before: int, rate_before: float, gain: float) -> bool:
        """Keep the number that the last epoch had if it paid; if not, go back, and measure that as well."""
        present, self._fixed_before = self.fixed, None
        if rate >= gain * rate_before or stalled <= STALLED:
            if present > before:
                self._retry_epochs = _RETRY_EPOCHS
            return True
        if present < before:  # so what seemed to be no gain was an epoch that costs more
            self.fixed, self.fixed_reason = before, f"{before} made more than {present}"
            self._lift_fixed_ceiling()
            return False
        self.fixed = max(before, self.most) if present > self.most else before
        self.fixed_reason = f"{present} made no more than {before}"
        self._fixed_before = present, rate, 1 / _USEFUL
        self._fixed_ceiling, self._fixed_ceiling_for = self.fixed, self._retry_epochs
        self._fixed_ceiling_work_ns = 0.0
        self._retry_epochs *= 2
        return False


class _Summary:
    """Some timings, summed up."""

    def __init__(self, timings: deque[BatchTiming]) -> None:
        loop_ns = sum(timing.step_ns + timing.handling_ns for timing in timings)
        wait_ns = sum(timing.wait_ns for timing in timings)
        self.stalled = wait_ns / max(1, loop_ns + wait_ns)
        """The fraction of the time that the step waited."""
        self.needed = sum(timing.work_ns for timing in timings) / max(1, loop_ns)
        """How many workers the work fills, if the step never waits."""
        self.busy = statistics.median_high(_totals_of(timing)[-1] / max(1, timing.work_ns) for timing in timings)
        """The fraction of the work that is not waiting, of a typical batch: a page that the system has to find, or a
        core that another machine takes, may be most of one batch's work."""
        self.typical_ns = statistics.median(timing.work_ns for timing in timings)
        """The median work of a batch, because a few slow samples do not show how workers affect each other."""


def _worth_starting(most: int, batches: int, work_ns: float, start_ns: int = START_NS, epochs: int = 1) -> int:
    """Return how many workers, at most `most`, are done first with the batches of some epochs, their start included.

    >>> _worth_starting(32, 32, 48_000_000)  # 8 take 8 starts and 4 batches each, 16 take 16 starts and 2 batches each
    8
    >>> _worth_starting(32, 32, 48_000_000, epochs=10)
    32
    """

    def passed_ns(workers: int) -> float:
        return workers * start_ns + epochs * math.ceil(batches / workers) * work_ns

    return min(range(1, max(1, most) + 1), key=passed_ns)


def _totals_of(timing: BatchTiming) -> tuple[int, int, int, int, int, int]:
    busy_ns = timing.work_ns if timing.busy_ns is None else timing.busy_ns
    return 1, timing.step_ns, timing.handling_ns, timing.wait_ns, timing.work_ns, busy_ns


def _waits_long(timing: BatchTiming) -> bool:
    """Return whether one batch is enough to see that more workers pay: it has waited, for longer than one's start."""
    *_, work_ns, busy_ns = _totals_of(timing)
    return work_ns >= START_NS and busy_ns < WAITING * work_ns


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.2g} ms"


def _workers_text(workers: int) -> str:
    return f"{workers} worker{'s' if workers > 1 else ''}" if workers else "batches made in the training process"
