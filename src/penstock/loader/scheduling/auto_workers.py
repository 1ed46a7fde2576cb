"""How many workers num_workers="auto" means: one rule, from what batches have shown. It has no clock and no process.

    looks at  what a batch costs, how much of that waits rather than computes, and how long the step is
    when      in the first batches; where an epoch begins; and twice a second, where any worker may make any batch

    no step seen yet  ▶ where samples wait, as many as pay for their start; else one for each core
    too few           the step waited for more than 5 % ▶ as many as the work of a batch fills the loop's time
    too many          at two looks fewer would have done, with a quarter to spare ▶ fewer
    tiny              the training process would make the batches itself in less than they take now ▶ none

There are no more workers than cores, except where they wait (for a disk, a network): n workers that compute a tenth of
their time keep n / 10 cores busy.

The aim is a step that does not wait, not a fast loader: loading that overlaps with the step costs nothing, and a worker
that is not needed costs a core and its memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.loader.workers.busy_time import WAITING, useful_workers

STALLED = 0.05
"""The fraction of the time that a step may wait before more workers are considered, which must gain as much."""

SPARE = 1.25
"""Fewer workers must be enough for this multiple of the work."""

TINY = 0.8
"""Workers go where the training process would take less than this multiple of the time that they take."""

LOOK_NS = 500_000_000
"""How long the first batch is waited for, and how much of a loop's time each look is about, within an epoch."""

LEAST_BATCHES = 3
"""How many batches a look is about, at least."""

START_NS = 20_000_000
"""What the start of a worker counts: a fork takes 6 ms on an idle core, and 25 to 100 ms on a busy machine."""

FIRST_BUSY_NS = 2_000_000
"""How long a worker computes with its first batch beside making it: it writes to its pages for the first time. Measured
on samples that sleep: 3 to 5 ms in all, and 1 to 3 ms with later batches."""

PERSISTENT_EPOCHS = 10
"""For how many epochs workers that persist are thought to make batches, when it is chosen how many are started."""

LEAST_NBYTES = 256 << 20
"""No further worker is started while less memory is free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTiming:
    """Where the time went between one batch being handed out and the next."""

    step_ns: int
    """The program's own step."""

    handling_ns: int
    """The training process's own work: sending tasks, receiving batches."""

    wait_ns: int
    """How long the step waited."""

    work_ns: int
    """Making the batch."""

    busy_ns: int
    """How much of the work was computing rather than waiting."""


@dataclass(slots=True)
class _Seen:
    """Batches since the last look, summed up."""

    batches: int = 0
    step_ns: int = 0
    handling_ns: int = 0
    wait_ns: int = 0
    work_ns: int = 0
    busy_ns: int = 0

    def add(self, timing: BatchTiming) -> None:
        self.batches += 1
        self.step_ns += timing.step_ns
        self.handling_ns += timing.handling_ns
        self.wait_ns += timing.wait_ns
        self.work_ns += timing.work_ns
        self.busy_ns += timing.busy_ns

    @property
    def loop_ns(self) -> int:
        """What the loop takes beside waiting."""
        return max(1, self.step_ns + self.handling_ns)

    @property
    def passed_ns(self) -> int:
        return self.loop_ns + self.wait_ns

    @property
    def stalled(self) -> float:
        """The fraction of the time that the step waited."""
        return self.wait_ns / self.passed_ns

    @property
    def needed(self) -> float:
        """How many workers the work fills, if the step never waits."""
        return self.work_ns / self.loop_ns


class AutoWorkers:
    """Decides how many workers there are, from the timing of every batch. Lives as long as its loader.

    Args:
        workers: how many there are before anything is known.
        most: how many there may be.
        most_waiting: how many there may be where they wait rather than compute; as `most`, if left out.
        least: how many there have to be.

    Example:
        >>> auto = AutoWorkers(workers=1, most=4)
        >>> timing = dict(step_ns=200_000_000, handling_ns=0, wait_ns=400_000_000)
        >>> [auto.observe(BatchTiming(**timing, work_ns=600_000_000, busy_ns=600_000_000)) for _ in range(4)]
        [1, 1, 3, 3]
    """

    def __init__(self, *, workers: int, most: int, most_waiting: int | None = None, least: int = 1) -> None:
        self.workers = workers
        self.reason = "a guess, before batches have shown what is needed"
        self.most = most
        self.most_waiting = most if most_waiting is None else most_waiting
        self.is_guess = True
        """Whether nothing has been looked at yet."""
        self.is_persistent = False
        """Whether the same workers make all epochs."""
        self.must_stay = False
        """Whether the training process must not make the batches itself: samples leave something in the process that
        makes them (see `lasting_effects`), or one has killed its worker."""
        self.asked: int | None = None
        """The number that a script has asked for, where this one takes its place."""
        self._least = least
        self._seen, self._last = _Seen(), _Seen()
        self._enough_before = 0
        """What would have been enough at the look before the last one."""

    # ── what is looked at ───────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """Forget the batches since the last look: they were made by another number of workers."""
        self._seen = _Seen()

    def note(self, timing: BatchTiming) -> None:
        """Record a batch of an epoch in which the number must not change."""
        self._seen.add(timing)

    def observe(self, timing: BatchTiming) -> int:
        """Record a batch, where the number may change at any; return how many workers there should be now."""
        self._seen.add(timing)
        if self._seen.passed_ns >= LOOK_NS and self._seen.batches >= LEAST_BATCHES:
            self._look(self.most_waiting)
        return self.workers

    def choose(self, *, is_fixed: bool) -> int:
        """Return the number of workers for an epoch that begins, from what was seen of the last one.

        Args:
            is_fixed: whether the number must not change in an epoch. All of the last one is then known, and no more
                workers begin than pay for their start in one as long.
        """
        batches, most = self._seen.batches, self.most_waiting
        if batches >= LEAST_BATCHES:
            self._look(_worth_starting(most, batches, self._seen.work_ns / batches) if is_fixed else most)
        return self.workers

    def plan_first(self, work_ns: int, busy_ns: int, *, batches: int, most: int) -> None:
        """Choose the number for the first epoch by its first batch: many more than the guess only if it has waited.

        Args:
            work_ns: how long the batch took.
            busy_ns: how much of that was computing.
            batches: of the epoch.
            most: how many workers the memory holds.
        """
        self.is_guess = False
        beside_ns = min(busy_ns, FIRST_BUSY_NS) if work_ns >= START_NS else 0
        busy, guess = (busy_ns - beside_ns) / max(1, work_ns - beside_ns), self.workers
        waits, epochs = busy <= WAITING, PERSISTENT_EPOCHS if self.is_persistent else 1
        allowed = min(most, self._allowed(busy) if waits else self.most)
        workers = max(guess, _worth_starting(allowed, batches, work_ns, epochs))
        if not waits:
            self._set(workers, f"a guess: the first batch computed for {busy:.0%} of its time")
        elif workers == guess:
            self._set(guess, "a guess: more would not pay for the time that it takes to start them")
        else:
            self._set(workers, f"the first batch waited for {1 - busy:.0%} of its time")

    # ── the rule ────────────────────────────────────────────────────────────────────────────────────────────

    def _look(self, most: int) -> None:
        """Choose the number, at most `most` (or one for each core), from the batches since the last look."""
        self.is_guess = False
        seen, self._seen = self._seen, _Seen()
        self._last = seen
        enough = max(self._least, math.ceil(SPARE * seen.needed))
        fewer, self._enough_before = max(enough, self._enough_before), enough
        allowed = self._allowed(seen.busy_ns / max(1, seen.work_ns))
        if self.workers > SPARE * allowed:
            self._set(allowed, "they compute, and have waited before")
        elif seen.stalled > STALLED:
            wanted = min(allowed, max(self.most, most), math.ceil(seen.needed))
            if wanted > self.workers:
                self._set(wanted, f"the step waited {seen.stalled:.0%} of the time for {_text(self.workers)}")
        elif fewer < self.workers:
            self._set(fewer, f"the work of a batch fills {seen.needed:.1f} workers while the step runs")

    def why_no_workers(self) -> str:
        """Return why the training process is to make the batches of all later epochs; an empty string if it is not.

        It would have taken clearly less time than the loop, and more workers could not have helped: there were as many
        as cores, or fetching alone took longer. There is no way back, because workers that are forked later would share
        the files that the dataset opens here.
        """
        seen = self._seen if self._seen.batches >= LEAST_BATCHES else self._last
        if seen.batches < LEAST_BATCHES or self.is_persistent or self.must_stay:
            return ""
        has_all_cores = self.workers >= self.most
        if seen.step_ns + seen.work_ns >= TINY * seen.passed_ns:
            return ""
        if not has_all_cores and seen.work_ns >= TINY * seen.handling_ns:
            return ""
        work, passed, step = (
            f"{ns / seen.batches / 1e6:.2g} ms" for ns in (seen.work_ns, seen.passed_ns, seen.step_ns)
        )
        taken = f"with {_text(self.workers)} the loop took {passed} for each, {step} of it its step"
        return f"making a batch takes {work}, and {taken}"

    def limit(self, most: int, reason: str) -> None:
        """Have at most `most` workers from now on, because the system allows no more."""
        self.most = self.most_waiting = most
        self._set(most, reason)

    def _allowed(self, busy: float) -> int:
        """Return how many workers there may be that are busy for this fraction of the time that they take.

        Of those that mostly wait twice as many beside the cores' own: they wait when they please, and with just as many
        a core has often nothing to do.
        """
        useful = useful_workers(self.most, busy)
        return max(self.most, min(self.most_waiting, 2 * useful - self.most if busy <= WAITING else useful))

    def _set(self, workers: int, reason: str) -> None:
        self.workers, self.reason = workers, reason


def _worth_starting(most: int, batches: int, work_ns: float, epochs: int = 1) -> int:
    """Return how many workers, at most `most`, are done first with the batches of some epochs, their start included.

    >>> _worth_starting(32, 32, 48_000_000)  # 8 take 8 starts and 4 batches each, 16 take 16 starts and 2 batches each
    8
    >>> _worth_starting(32, 32, 48_000_000, epochs=10)
    32
    """

    def passed_ns(workers: int) -> float:
        return workers * START_NS + epochs * math.ceil(batches / workers) * work_ns

    return min(range(1, max(1, most) + 1), key=passed_ns)


def _text(workers: int) -> str:
    """Return a number of workers in words, as in "2 workers"."""
    return f"{workers} worker{'s' if workers > 1 else ''}"
