"""Derives figures from a loader's counters: the loops' duration, throughput and stall.

A loop over a loader alternates between the user's step and loading, in which the step waits for the next batch. With
workers, loading is waiting and transport. Without workers the dataset runs in the loop, so its time is loading too.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import chain

from penstock.core.stats import LoaderStatistics, StageTimes
from penstock.observe.record.rank_record import RankRecord

_SUMMED = ("epochs", "batches", "samples", "nbytes", "restarts", "retried", "skipped")


def loading_s(counted: LoaderStatistics) -> float:
    """Return the seconds that loops over the loader spent waiting for batches."""
    stages = counted.stages
    inline_s = stages.fetch_s + stages.collate_s if counted.worker_type == "inline" else 0.0
    return stages.wait_s + stages.transport_s + inline_s


def loop_s(counted: LoaderStatistics) -> float:
    """Return the seconds spent in loops over the loader."""
    return loading_s(counted) + counted.stages.step_s


def samples_per_s(counted: LoaderStatistics) -> float:
    """Return samples per second of loop; 0 before the first batch."""
    seconds = loop_s(counted)
    return counted.samples / seconds if seconds > 0 else 0.0


def stall_fraction(counted: LoaderStatistics) -> float:
    """Return the fraction of the loops' time in which the step waited for data, between 0 and 1."""
    seconds = loop_s(counted)
    return loading_s(counted) / seconds if seconds > 0 else 0.0


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


def samples_per_s_of_ranks(ranks: Iterable[RankRecord]) -> float:
    """Return the summed throughput of ranks that run at the same time, in samples per second of loop."""
    return sum(rank.samples / rank.loop_s for rank in ranks if rank.loop_s > 0)
