"""Trials: one loop fed in several ways by turns, and how much faster one of them was than another."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

AS_IT_IS = "as it is"
FREE = "loading free"
MORE_WORKERS = "2 more workers"
FEWER_WORKERS = "fewer workers"
NO_WORKERS = "no workers"
THREADS = "threads"
PROCESSES = "processes"
PENSTOCK = "penstock's loader"
PERSISTENT = "persistent workers"
PINNED = "pinned"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Some batches in a row from one source, as the loop saw them."""

    batches: int
    """How many were timed."""

    wall_s: float
    """For all of them, the steps included."""

    wait_s: float
    """Of that, in which the loop waited for its data."""

    step_s: float
    """Of that, in the loop's own work (with an accelerator: until it had been given out)."""

    @property
    def batch_s(self) -> float:
        """Seconds per batch."""
        return self.wall_s / self.batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One way to feed the loop, and how it went, in stretches by turns with the loop as it is."""

    name: str
    """Which: "as it is", "loading free" ..."""

    line: str = ""
    """The arguments to write for it."""

    stretches: tuple[Stretch, ...] = ()
    """One for each round; empty when it could not be tried."""

    startup_s: float | None = None
    """From the beginning of its first epoch to its first batch."""

    failure: str = ""
    """Why it could not be tried."""

    @property
    def batch_s(self) -> float | None:
        """The median of seconds per batch."""
        return statistics.median(one.batch_s for one in self.stretches) if self.stretches else None

    @property
    def waited_share(self) -> float | None:
        """The share of time in which the loop waited."""
        wall_s = sum(one.wall_s for one in self.stretches)
        return sum(one.wait_s for one in self.stretches) / wall_s if wall_s else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """How many times as fast one trial was as another, round by round."""

    median: float
    """Of the rounds' factors; 1.5 is half as many batches more."""

    low: float
    """The least of them."""

    high: float
    """The greatest."""

    rounds: int
    """How many there were."""

    @property
    def is_clear(self) -> bool:
        """Whether all rounds agree that it is faster, or all that it is slower, or that there is no difference."""
        return self.rounds > 1 and (self.low > 1.0 or self.high < 1.0 or self.is_none)

    @property
    def is_none(self) -> bool:
        """Whether there is no difference worth a change."""
        return 0.95 <= self.median <= 1.05 and self.high < 1.25 and self.low > 0.8

    def pays(self, least: float = 1.1) -> bool:
        """Return whether it is surely faster, and by `least`."""
        return self.is_clear and self.median >= least


def gain(before: Trial, after: Trial) -> Gain | None:
    """Return how much faster `after` was than `before`; None where one of them has no stretch.

    >>> slow = Trial(name="a", stretches=(Stretch(batches=2, wall_s=4.0, wait_s=3.0, step_s=1.0),))
    >>> fast = Trial(name="b", stretches=(Stretch(batches=4, wall_s=4.0, wait_s=0.0, step_s=4.0),))
    >>> gain(slow, fast).median
    2.0
    """
    factors = [one.batch_s / other.batch_s for one, other in zip(before.stretches, after.stretches, strict=False)]
    if not factors:
        return None
    return Gain(median=statistics.median(factors), low=min(factors), high=max(factors), rounds=len(factors))
