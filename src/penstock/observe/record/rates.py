"""Sums and differences of loaders' counters. What is derived from one loader's is defined in core/stats.py.

A loop over a loader alternates between the user's step and loading, in which the step waits for the next batch. So the
share that waited and the step's share add up to 1, and every report of a run takes both from here.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain

from penstock.core.stats import LoaderStatistics, StageTimes
from penstock.observe.record.rank_record import RankRecord

_SUMMED = ("epochs", "batches", "samples", "nbytes", "restarts", "retried", "skipped")


HIDDEN = 0.05
"""Below this stall fraction, a faster loader gains nothing worth the work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Counters over all loops of a run."""

    batches: int
    samples: int
    nbytes: int

    loading_s: float
    """Seconds that loops waited for data."""

    loop_s: float
    """Seconds spent in loops: waiting, and steps."""

    stages: StageTimes
    """Seconds by stage."""

    samples_per_s: float
    """Per second of loop; of several ranks, the sum of theirs."""

    @property
    def stall_fraction(self) -> float:
        """The share of the loops' time that the step waited for data, between 0 and 1."""
        return self.loading_s / self.loop_s if self.loop_s else 0.0


def total(every: Iterable[LoaderStatistics], ranks: Sequence[RankRecord] = ()) -> Totals:
    """Return the sums over loaders, of a run of these ranks."""
    counted = list(every)
    stages = total_stages(one.stages for one in counted)
    loading_s, samples = sum(one.loading_s for one in counted), sum(one.samples for one in counted)
    loop_s = loading_s + stages.step_s
    alone = samples / loop_s if loop_s else 0.0
    return Totals(
        batches=sum(one.batches for one in counted),
        samples=samples,
        nbytes=sum(one.nbytes for one in counted),
        loading_s=loading_s,
        loop_s=loop_s,
        stages=stages,
        samples_per_s=sum(rank.samples_per_s for rank in ranks) if ranks else alone,
    )


def gain_without(fraction: float) -> float:
    """Return how much faster a loop would be without a part that takes this share of its time.

    >>> gain_without(0.5)
    2.0
    """
    return 1 / max(0.01, 1 - fraction)


def statistics_between(earlier: LoaderStatistics, later: LoaderStatistics) -> LoaderStatistics:
    """Return the batches, samples, bytes and stage times that were counted between two snapshots."""
    return LoaderStatistics(
        batches=later.batches - earlier.batches,
        samples=later.samples - earlier.samples,
        nbytes=later.nbytes - earlier.nbytes,
        stages=stages_between(earlier.stages, later.stages),
        worker_type=later.worker_type,
    )


def combine_statistics(every: Sequence[LoaderStatistics]) -> LoaderStatistics:
    """Return the statistics of several loaders as one: counters are summed, settings and gauges are the last one's."""
    return replace(
        every[-1],
        **{name: sum(getattr(one, name) for one in every) for name in _SUMMED},
        first_batch_s=statistics.median(one.first_batch_s for one in every),
        stages=total_stages(one.stages for one in every),
        quarantined=tuple(chain.from_iterable(one.quarantined for one in every)),
        skipped_indices=tuple(chain.from_iterable(one.skipped_indices for one in every)),
        index_digests=tuple(chain.from_iterable(one.index_digests for one in every)),
        ring=replace(every[-1].ring, copied_out=sum(one.ring.copied_out for one in every)),
    )


def total_stages(stages: Iterable[StageTimes]) -> StageTimes:
    """Return the sum of `stages`, stage by stage."""
    every = list(stages)
    return StageTimes(**{field.name: sum(getattr(one, field.name) for one in every) for field in fields(StageTimes)})


def stages_between(earlier: StageTimes, later: StageTimes) -> StageTimes:
    """Return the difference of two stage times, stage by stage."""
    return StageTimes(
        **{field.name: getattr(later, field.name) - getattr(earlier, field.name) for field in fields(StageTimes)}
    )
