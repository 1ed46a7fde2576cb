"""A run over time: moments, taken now and then, each with what had been counted by then.

A timeline keeps a bounded number of moments, however long the run: when it is full, every second one is dropped, and
moments are taken half as often.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.stats import StageTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What was seen at one time; batches, samples, bytes and seconds are counted from the start, over all loaders."""

    at_s: float
    """Since the run's start."""

    batches: int = 0
    """Handed out so far."""

    samples: int = 0
    """In those."""

    nbytes: int = 0
    """Of those."""

    stages: StageTimes = field(default_factory=StageTimes)
    """Seconds by stage so far."""

    loading_s: float = 0.0
    """Seconds so far in which a loop waited for its data (without workers: in which it made them itself)."""

    ready: int = 0
    """Batches that lay ready to be handed out."""

    held: int = 0
    """Batches that the program still looked at."""

    workers: int = 0
    """Workers of loops under way."""

    working: int = 0
    """Those of them that were making something."""

    slots_nbytes: int = 0
    """Host memory of all loaders' slots."""

    host_nbytes: int | None = None
    """Host memory of all of the run's processes, a page shared by n counted once; None where it was not looked at."""

    device_nbytes: int | None = None
    """Device memory of tensors; None without an accelerator."""

    device_reserved_nbytes: int | None = None
    """Device memory that torch's allocator has taken, cached blocks included."""

    device_busy: float | None = None
    """Share of the last while in which the device ran something, between 0 and 1, where its driver tells."""


class Timeline:
    """Keeps moments.

    Args:
        most: how many are kept; an even number.
        period_s: how far apart they are at first.
    """

    def __init__(self, most: int = 1200, period_s: float = 0.5) -> None:
        self._most = most
        self._moments: list[Moment] = []
        self.period_s = period_s

    def is_due(self, at_s: float) -> bool:
        """Return whether it is time for another moment, `at_s` after the start."""
        return not self._moments or at_s - self._moments[-1].at_s >= self.period_s

    def add(self, moment: Moment) -> None:
        """Keep a moment, later than all before it."""
        if len(self._moments) == self._most:
            del self._moments[1::2]
            self.period_s *= 2
        self._moments.append(moment)

    def moments(self) -> tuple[Moment, ...]:
        """Return what has been kept, in the order of time."""
        return tuple(self._moments)
