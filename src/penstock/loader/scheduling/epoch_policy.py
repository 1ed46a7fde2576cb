"""How many workers an epoch has in which the number must not change: chosen by its first batch, then epoch by epoch."""

from __future__ import annotations

import math

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

_GUESS = "a guess, before the first epoch has shown what is needed"


class EpochPolicy:
    """Decides how many workers an epoch has, from the timing of the epochs before it.

    Args:
        limits: of the loader.
        workers: how many there are in the first epoch.
    """

    def __init__(self, limits: WorkerLimits, workers: int) -> None:
        self.workers = self._guessed = workers
        self.reason = _GUESS
        self.is_persistent = False
        """Whether the number stays for all epochs, because its workers do."""
        self._limits = limits
        self._totals = [0] * 6
        """Of an epoch: batches, step, handling, waiting, work, busy."""
        self._before: tuple[int, float, float] | None = None
        """While a number is on trial: the one before, its batches per nanosecond, and which multiple of those the new
        one must make to stay."""
        self._ceiling: int | None = None
        """What was best when more did not help."""
        self._ceiling_for = 0
        self._ceiling_work_ns = 0.0
        """What so many workers had to do for a batch; 0 before they were measured. With other work it is another
        question."""
        self._enough_before = 0
        """What would have been enough in the epoch before the last one."""
        self._retry_epochs = _RETRY_EPOCHS

    @property
    def is_guess(self) -> bool:
        """Whether nothing has been measured yet that would tell what the fixed number should be."""
        return self.reason == _GUESS

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
        allowed = self._limits.allowed(busy) if waits else self._limits.most
        known = _UNKNOWN_LENGTH if batches is None else batches
        workers = _worth_starting(min(allowed, most), known, work_ns, self._limits.start_ns, epochs)
        if not waits:
            self.workers = max(guess, workers)
            self.reason = f"a guess: the first batch computed for {busy:.0%} of its time"
            return
        self._limits.most_waiting = max(self._limits.most, min(self._limits.most_waiting, most))
        if workers <= guess:
            self.workers, self._before = guess, None
            self.reason = "a guess: more would not pay for the time that it takes to start them"
            return
        self._before = guess, guess / max(1, work_ns), CLEARLY_USEFUL
        self.workers, self.reason = workers, f"the first batch waited for {1 - busy:.0%} of its time"

    def note(self, timing: BatchTiming) -> None:
        """Record a batch of an epoch whose number of workers is fixed."""
        for at, value in enumerate(totals_of(timing)):
            self._totals[at] += value

    def why_no_workers(self) -> str:
        """Return why the training process is to make the batches of all later epochs; an empty string if it is not.

        The last epoch's would have taken it clearly less time than it spent on fetching them, and more workers could
        not have helped: there were as many as cores, or fetching alone took longer. There is no way back, because
        workers that are forked later would share the files that the dataset opens here.
        """
        batches, step_ns, handling_ns, wait_ns, work_ns, _ = self._totals
        if batches < WINDOW or self.is_persistent or self._limits.least or self._limits.has_effects:
            return ""
        loop_ns, alone_ns = step_ns + handling_ns + wait_ns, step_ns + work_ns
        if alone_ns >= TINY * loop_ns or (self.workers < self._limits.most and work_ns >= TINY * handling_ns):
            return ""
        return (
            f"making a batch takes {ms_text(work_ns / batches)}, and with {workers_text(self.workers)} the loop took "
            f"{ms_text(loop_ns / batches)} for each, {ms_text(step_ns / batches)} of it its step"
        )

    def choose(self) -> int:
        """Return the number of workers for an epoch in which it must not change, from the last epochs' timings."""
        batches, step_ns, handling_ns, wait_ns, work_ns, busy_ns = self._totals
        self._totals = [0] * 6
        if batches < WINDOW:
            return self.workers
        loop_ns = step_ns + handling_ns
        rate = batches / max(1, loop_ns + wait_ns)
        needed, stalled = work_ns / max(1, loop_ns), wait_ns / max(1, wait_ns + loop_ns)
        enough = max(1, math.ceil(SPARE * needed))
        # Epochs may cost different amounts: fewer workers have to have been enough for two of them.
        enough, self._enough_before = max(enough, self._enough_before), enough
        if self._before is not None and not self._stays(rate, stalled, *self._before):
            return self.workers
        worth = _worth_starting(
            self._limits.allowed(busy_ns / max(1, work_ns)), batches, work_ns / batches, self._limits.start_ns
        )
        most = min(max(self._limits.most, worth), self._ceiling_at(work_ns / batches))
        if stalled > STALLED and self.workers < most:
            before = self.workers
            has_failed = self._retry_epochs > _RETRY_EPOCHS
            self.workers = min(most, before + max(1, before // 4) if has_failed else max(before + 1, math.ceil(needed)))
            self._before = before, rate, USEFUL
            self.reason = f"the step waited {stalled:.0%} of the last epoch"
        elif stalled <= STALLED and enough < self.workers:
            self.workers = enough
            self.reason = f"the work of a batch filled {needed:.1f} workers in the last epoch"
        return self.workers

    def _ceiling_at(self, work_ns: float) -> int:
        """Return how many workers there may be at most where a batch takes so much work; count an epoch."""
        if self._ceiling is None:
            return self._limits.most_waiting
        if self.workers == self._ceiling:
            self._ceiling_work_ns = known_ns = self._ceiling_work_ns or max(1.0, work_ns)
            if not 1 / COST_CHANGE < work_ns / known_ns < COST_CHANGE:
                self._lift_ceiling()
                return self._limits.most_waiting
        ceiling = self._ceiling
        self._ceiling_for -= 1
        if self._ceiling_for == 0:
            self._ceiling = None
        return ceiling

    def _lift_ceiling(self) -> None:
        self._ceiling, self._retry_epochs = None, _RETRY_EPOCHS

    def _stays(self, rate: float, stalled: float, before: int, rate_before: float, gain: float) -> bool:
        """Keep the number that the last epoch had if it paid; if not, go back, and measure that as well."""
        present, self._before = self.workers, None
        if rate >= gain * rate_before or stalled <= STALLED:
            if present > before:
                self._retry_epochs = _RETRY_EPOCHS
            return True
        if present < before:  # so what seemed to be no gain was an epoch that costs more
            self.workers, self.reason = before, f"{before} made more than {present}"
            self._lift_ceiling()
            return False
        self.workers = max(before, self._limits.most) if present > self._limits.most else before
        self.reason = f"{present} made no more than {before}"
        self._before = present, rate, 1 / USEFUL
        self._ceiling, self._ceiling_for = self.workers, self._retry_epochs
        self._ceiling_work_ns = 0.0
        self._retry_epochs *= 2
        return False


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
