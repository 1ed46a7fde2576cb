"""What follows from a loader's counters: how long its loops took, how fast they went, how long the step waited.

A loop over a loader has two halves: the user's step, and getting the next batch. With workers, getting it means
waiting and rebuilding; without, the dataset itself runs there, so that its time is waiting too.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import chain

from penstock.core.stats import LoaderStatistics, StageTimes
from penstock.observe.rank_record import RankRecord

_SUMMED = ("epochs", "batches", "samples", "nbytes", "restarts", "reissued", "skipped")


def loading_s(counted: LoaderStatistics) -> float:
    """Return the seconds that loops over the loader spent on getting their batches."""
    stages = counted.stages
    inline_s = stages.fetch_s + stages.collate_s if counted.body == "inline" else 0.0
    return stages.wait_s + stages.transport_s + inline_s


def loop_s(counted: LoaderStatistics) -> float:
    """Return the seconds spent in loops over the loader."""
    return loading_s(counted) + counted.stages.step_s


def samples_per_s(counted: LoaderStatistics) -> float:
    """Return samples per second of loop, 0 before there was any."""
    seconds = loop_s(counted)
    return counted.samples / seconds if seconds > 0 else 0.0


def waited_share(counted: LoaderStatistics) -> float:
    """Return the share of the loops' time in which the step waited for data, between 0 and 1."""
    seconds = loop_s(counted)
    return loading_s(counted) / seconds if seconds > 0 else 0.0


def since(earlier: LoaderStatistics, later: LoaderStatistics) -> LoaderStatistics:
    """Return what a loader counted between two snapshots: batches, samples, bytes and stage times."""
    return LoaderStatistics(
        batches=later.batches - earlier.batches,
        samples=later.samples - earlier.samples,
        nbytes=later.nbytes - earlier.nbytes,
        stages=stages_between(earlier.stages, later.stages),
        body=later.body,
    )


def together(every: Sequence[LoaderStatistics]) -> LoaderStatistics:
    """Return the statistics of loaders that are alike, as if they had been one; the rest is the last one's."""
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
    """Return what was spent between two moments, stage by stage."""
    return StageTimes(
        **{field.name: getattr(later, field.name) - getattr(earlier, field.name) for field in fields(StageTimes)}
    )


def of_ranks(ranks: Iterable[RankRecord]) -> float:
    """Return samples per second of loop of ranks that run side by side."""
    return sum(rank.samples / rank.loop_s for rank in ranks if rank.loop_s > 0)
