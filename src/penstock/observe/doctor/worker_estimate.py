"""How many workers a loop could use, and how much faster it would be: an estimate from what its batches took.

Workers that wait (for a disk, a network) need no core, so there may be more of them than cores; workers that compute
share the cores with the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.core.stats import LoaderStatistics
from penstock.loader.workers.busy_time import WAITING, useful_workers

_WORKERS_PER_CORE = 1.5
"""Workers per core: some workers wait for storage while others compute."""

_MOST = 32
"""No more are recommended: each takes memory, and what they wait for may serve only so many at a time."""

_SPARE = 1.25
"""What workers make, as a multiple of what the step takes up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopTimes:
    """What a loop took, in seconds per batch or in all."""

    step_s: float
    """The program's own steps."""

    loading_s: float
    """Making the batches, summed over workers."""

    asleep_s: float
    """Of that, waiting rather than computing."""

    loop_s: float
    """The loop, from its beginning to its end."""

    @classmethod
    def of(cls, counted: LoaderStatistics) -> LoopTimes:
        """Return what the loops over one loader took in all."""
        stages = counted.stages
        return cls(
            step_s=stages.step_s,
            loading_s=stages.fetch_s + stages.collate_s,
            asleep_s=stages.asleep_s,
            loop_s=counted.loop_s,
        )

    @property
    def waiting_fraction(self) -> float:
        """The share of loading that is waiting."""
        return min(1.0, self.asleep_s / self.loading_s) if self.loading_s else 0.0

    @property
    def waits(self) -> bool:
        """Whether loading mostly waits, so that more workers than cores gain."""
        return self.waiting_fraction > 1 - WAITING


def fitting_workers(cores: float) -> int:
    """Return the most workers that compute and keep so many cores busy, while some of them wait for storage.

    >>> fitting_workers(2), fitting_workers(0.5)
    (3, 1)
    """
    return max(1, round(_WORKERS_PER_CORE * cores))


def workers_to_try(times: LoopTimes, cores: float, present: int = 0) -> int:
    """Return how many workers to try: enough to hide loading behind the step, as far as the cores allow.

    At least two more than at `present`: workers that could keep up by their mean do not where samples are uneven.

    >>> workers_to_try(LoopTimes(step_s=1.0, loading_s=9.0, asleep_s=0.0, loop_s=10.0), 4)
    4
    >>> workers_to_try(LoopTimes(step_s=1.0, loading_s=9.0, asleep_s=9.0, loop_s=10.0), 4)
    12
    """
    cores = max(1, math.floor(cores))
    most = min(_MOST, useful_workers(cores, 1 - times.waiting_fraction)) if times.waits else cores
    needed = math.ceil(_SPARE * times.loading_s / times.step_s) if times.step_s else most
    return max(present, min(max(present + 2, needed), most))


def gain_of_workers(times: LoopTimes, workers: int, cores: float) -> float:
    """Return how many times as fast the loop would be with so many workers; at least 1.

    Steps and loading then run side by side: the loop takes as long as its steps or as the loading of one worker, or as
    all that computes takes on these cores beside the waits, whichever is longest.

    >>> round(gain_of_workers(LoopTimes(step_s=1.0, loading_s=19.0, asleep_s=0.0, loop_s=20.0), 2, 2), 2)
    2.0
    """
    computing_s = times.step_s + times.loading_s - times.asleep_s
    shared_s = times.asleep_s / max(1, workers) + computing_s / max(1.0, cores)
    shortest_s = max(times.step_s, times.loading_s / max(1, workers), shared_s)
    return max(1.0, times.loop_s / shortest_s) if shortest_s else 1.0
