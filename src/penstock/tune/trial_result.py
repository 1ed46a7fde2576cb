"""What trials of one setting showed: the sums over all of them, and the figures that are derived from these."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from penstock.core.stats import LoaderStatistics
from penstock.loader.workers.busy_time import busy_part
from penstock.tune.setting import Setting

_BLOCKS = 8
"""Batches are averaged in this many blocks per trial; the spread between blocks gives the error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingTrial:
    """What one setting showed, over all its trials."""

    setting: Setting
    """The setting."""

    samples_per_s: float
    """Of the loop, with its step; what the start of its worker processes takes is spread over an epoch."""

    error: float
    """The relative error of that: two standard errors of the mean over blocks of batches."""

    stall_fraction: float
    """The fraction of the loop's time in which the step waited for data, or data was made in this process."""

    batch_ms: tuple[float, float, float]
    """Milliseconds from batch to batch: the lower quartile, the median, the upper quartile."""

    ram_nbytes: int
    """The most that workers and batches took beyond the training process; a shared page counts once."""

    batches: int
    """How many were timed."""

    work_s: float
    """Making a batch, summed over its workers."""

    handling_s: float
    """In the training process, per batch: dispatching tasks and receiving results."""

    step_s: float
    """The step."""

    batch_nbytes: int
    """Of tensors and arrays in a batch."""

    busy_fraction: float = 1.0
    """Of the time in which worker processes made batches, the fraction on a processor."""


@dataclass(slots=True)
class TrialTotals:
    """The measurements of one setting so far."""

    periods_s: list[float] = field(default_factory=list)
    """Seconds from batch to batch."""
    blocks_s: list[float] = field(default_factory=list)
    """Means of consecutive periods."""
    seen: list[LoaderStatistics] = field(default_factory=list)
    """The loader's statistics of each trial."""
    ram_nbytes: int = 0
    cpu_s: float = 0.0
    """CPU time of the worker processes."""
    without_core_s: float = 0.0
    """How long they waited for a core: they were not computing, and would have been."""
    drained: int = 0
    """Batches that had been prefetched before: while the loop used them up, it was faster than its workers are."""

    def add_periods(self, periods_s: list[float], workers: int = 0) -> None:
        """Add the periods of one trial with so many workers, whose batches may come all at once."""
        self.periods_s += periods_s
        size = max(1, len(periods_s) // _BLOCKS)
        if workers:  # whole rounds
            size = workers * math.ceil(size / workers)
        self.blocks_s += [statistics.fmean(periods_s[at : at + size]) for at in range(0, len(periods_s), size)]

    def result(self, setting: Setting, *, start_s: float = 0.0) -> SettingTrial:
        """Return what all trials of `setting` have shown so far; for each batch, `start_s` of starting workers."""
        batches = sum(one.batches for one in self.seen)
        per_batch = 1 / max(1, batches)
        total_s = sum(self.periods_s)
        mean_s = total_s / max(1, len(self.periods_s) - self.drained)
        late_s = len(self.periods_s) * mean_s - total_s
        samples = sum(one.samples for one in self.seen) * per_batch
        blocks = self.blocks_s
        unknown_s = mean_s / (16 if setting.workers > _BLOCKS else 4)  # a round of many workers is a mean already
        spread_s = statistics.stdev(blocks) / len(blocks) ** 0.5 if len(blocks) > 2 else unknown_s
        periods_s = self.periods_s if len(self.periods_s) > 1 else [mean_s] * 2
        low, middle, high = statistics.quantiles(periods_s, n=4, method="inclusive")
        stages = [one.stages for one in self.seen]
        work_s = sum(one.fetch_s + one.collate_s for one in stages)
        is_known = setting.worker_type == "process" and work_s > 0
        shares = [round(part_s / max(1e-9, work_s) * 1e9) for part_s in (self.cpu_s, self.without_core_s)]
        return SettingTrial(
            setting=setting,
            samples_per_s=samples / (mean_s + start_s),
            error=2 * spread_s / (mean_s + start_s),
            stall_fraction=min(1.0, (sum(map(_waited_s, self.seen)) + late_s) / (total_s + late_s)),
            batch_ms=(low * 1e3, middle * 1e3, high * 1e3),
            ram_nbytes=self.ram_nbytes,
            batches=batches,
            work_s=work_s * per_batch,
            handling_s=sum(one.transport_s for one in stages) * per_batch,
            step_s=sum(one.step_s for one in stages) * per_batch,
            batch_nbytes=round(sum(one.nbytes for one in self.seen) * per_batch),
            busy_fraction=busy_part(10**9, *shares) / 1e9 if is_known else 1.0,
        )


def _waited_s(counted: LoaderStatistics) -> float:
    """Return how long the step waited, without transport, which no number of workers shortens."""
    stages = counted.stages
    return stages.wait_s + (stages.fetch_s + stages.collate_s if counted.worker_type == "inline" else 0.0)
