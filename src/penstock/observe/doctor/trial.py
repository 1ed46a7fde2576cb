"""Trials: one loop fed in several ways, interleaved, and how much faster one way was than another."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from penstock.observe.doctor import thresholds

_AGREEING_ROUNDS = 1.3
"""Times as fast: the fastest round of a trial beside its slowest one; otherwise the gain is not known."""

AS_IS = "as is"
FREE = "loading free"
MORE_WORKERS = "2 more workers"
FEWER_WORKERS = "fewer workers"
PENSTOCK = "penstock's loader"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingWindow:
    """Consecutive batches from one source, as the loop experienced them, without those that were made ahead."""

    batches: int
    """How many were timed."""

    wall_s: float
    """For all of them, steps included."""

    wait_s: float
    """Of that, the time in which the loop waited for data."""

    step_s: float
    """Of that, the time of the loop's own work (with an accelerator: until the work was queued)."""

    queued_s: float = 0.0
    """Of that, the time in which the loop could have run and other threads had the processors."""

    start_s: float = 0.0
    """Of the wait, the time in which epochs of the loader began, until their first batch."""

    @property
    def batch_s(self) -> float:
        """Seconds per batch."""
        return self.wall_s / self.batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One way to feed the loop, timed in windows that alternate with those of the unchanged loop."""

    name: str
    """Which: "as is", "loading free" ..."""

    line: str = ""
    """The arguments to write for it."""

    windows: tuple[TimingWindow, ...] = ()
    """One per round; empty when the trial could not be run."""

    startup_s: float | None = None
    """From the start of an epoch to its first batch."""

    failure: str = ""
    """Why the trial could not be run."""

    @property
    def batch_s(self) -> float | None:
        """Median seconds per batch."""
        return statistics.median(one.batch_s for one in self.windows) if self.windows else None

    @property
    def batch_within_epoch_s(self) -> float | None:
        """Median seconds per batch, without the starts of epochs: some windows have one and others none."""
        if not self.windows:
            return None
        return statistics.median(max(0.0, one.wall_s - one.start_s) / one.batches for one in self.windows)

    @property
    def idle_machine_s(self) -> float | None:
        """Median seconds per batch, without the time in which the loop waited for a processor."""
        if not self.windows:
            return None
        return statistics.median(max(0.0, one.wall_s - one.queued_s) / one.batches for one in self.windows)

    @property
    def step_s(self) -> float | None:
        """Mean seconds of the loop's own work per batch."""
        if not self.windows:
            return None
        return sum(one.step_s for one in self.windows) / sum(one.batches for one in self.windows)

    @property
    def wait_fraction(self) -> float | None:
        """The fraction of time in which the loop waited for data."""
        wall_s = sum(one.wall_s for one in self.windows)
        return min(1.0, sum(one.wait_s for one in self.windows) / wall_s) if wall_s else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """How many times as fast one trial was as another, compared round by round."""

    median: float
    """Of the rounds' factors; 1.5 means half as many batches more in the same time."""

    low: float
    """The smallest factor."""

    high: float
    """The largest factor."""

    rounds: int
    """How many rounds were compared."""

    @property
    def is_clear(self) -> bool:
        """Whether there were two rounds or more, and they agree about how much; else the gain is not known."""
        return self.rounds > 1 and self.high <= _AGREEING_ROUNDS * self.low

    @property
    def is_loss(self) -> bool:
        """Whether all rounds were slower, but for a difference that is nobody's."""
        return self.rounds > 1 and self.high < 1.0 / thresholds.WORTHWHILE_GAIN

    def pays(self, least: float = thresholds.WORTHWHILE_GAIN) -> bool:
        """Return whether it is clearly faster, and by the factor `least` or more."""
        return self.is_clear and self.low > 1.0 and self.median >= least


def gain_between(before: Trial, after: Trial) -> Gain | None:
    """Return how much faster `after` was than `before`; None where one of them has not been timed.

    >>> slow = Trial(name="a", windows=(TimingWindow(batches=2, wall_s=4.0, wait_s=3.0, step_s=1.0),))
    >>> fast = Trial(name="b", windows=(TimingWindow(batches=4, wall_s=4.0, wait_s=0.0, step_s=4.0),))
    >>> gain_between(slow, fast).median
    2.0
    """
    # Rounds are compared in pairs: load on the machine that lasts longer than a round slows both sides alike.
    factors = [one.batch_s / other.batch_s for one, other in zip(before.windows, after.windows, strict=False)]
    if not factors:
        return None
    return Gain(median=statistics.median(factors), low=min(factors), high=max(factors), rounds=len(factors))
