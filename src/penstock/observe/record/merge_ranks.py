"""Merges the records of several ranks: counters stay apart by rank, memory held at the same time is added up."""

from __future__ import annotations

import datetime
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from penstock.observe.meters.device_meter import DeviceMemory
from penstock.observe.meters.host_memory import HostMemory
from penstock.observe.record import rates
from penstock.observe.record.rank_record import RankRecord
from penstock.observe.record.run_record import RunRecord
from penstock.observe.record.timeline import TimelinePoint

_COUNTS = ("batches", "samples", "nbytes", "loading_s", "ready", "held", "workers", "working", "slots_nbytes")
_SIZES = (
    "host_nbytes",
    "device_nbytes",
    "device_peak_nbytes",
    "device_reserved_nbytes",
)


def merge_ranks(records: Mapping[int, RunRecord], missing: Mapping[int, str]) -> RunRecord:
    """Return the record of all ranks.

    Args:
        records: the known records, by rank; at least one.
        missing: why a rank's record is missing or incomplete, by rank.
    """
    ranks = sorted({*records, *missing})
    lowest = records[min(records)]
    codes = [record.exit_code for record in records.values()]
    started = {rank: _unix_s(record) for rank, record in records.items()}
    earliest = min(started, key=lambda rank: started[rank])
    # What ended first is the reason why the others ended: their connections break, and torchrun kills them.
    by_end = sorted(records, key=lambda rank: started[rank] + records[rank].wall_s)
    failed = [code for rank in by_end if (code := records[rank].exit_code)]
    errors = [f"rank {rank}: {error}" for rank in by_end if (error := records[rank].error)]
    return replace(
        lowest,
        started=records[earliest].started,
        wall_s=max(started[rank] - started[earliest] + record.wall_s for rank, record in records.items()),
        exit_code=failed[0] if failed else None if None in codes or set(ranks) > set(records) else 0,
        error=errors[0] if errors else None,
        memory=_memory([record.memory for record in records.values()]),
        device_memory=_device_memory([record.device_memory for record in records.values()]),
        forks_with_loaders=sum(record.forks_with_loaders for record in records.values()),
        children_cpu_s=sum(record.children_cpu_s for record in records.values()),
        loaders=tuple(
            replace(loader, rank=rank) for rank, record in sorted(records.items()) for loader in record.loaders
        ),
        timeline=merge_timelines(
            [(started[rank] - started[earliest], record.timeline) for rank, record in records.items()]
        ),
        ranks=tuple(_rank(rank, records.get(rank), missing.get(rank, "")) for rank in ranks),
    )


def merge_timelines(timelines: Sequence[tuple[float, Sequence[TimelinePoint]]]) -> tuple[TimelinePoint, ...]:
    """Return one timeline with a point for each of the longest one, the sum over all timelines at that time.

    Args:
        timelines: each with its delay in seconds after the first.
    """
    shifted = [([point.at_s + delay_s for point in points], points) for delay_s, points in timelines if points]
    if not shifted:
        return ()
    times, _ = max(shifted, key=lambda one: one[0][-1])
    return tuple(
        _sum_points(at_s, [points[number - 1] for ats, points in shifted if (number := bisect_right(ats, at_s))])
        for at_s in times
    )


def _sum_points(at_s: float, points: Sequence[TimelinePoint]) -> TimelinePoint:
    counts: dict[str, Any] = {name: sum(getattr(point, name) for point in points) for name in _COUNTS}
    sizes: dict[str, Any] = {}
    for name in _SIZES:
        known = [value for point in points if (value := getattr(point, name)) is not None]
        sizes[name] = sum(known) if known else None
    utilizations = [point.device_utilization for point in points if point.device_utilization is not None]
    return TimelinePoint(
        at_s=at_s,
        stages=rates.total_stages(point.stages for point in points),
        device_utilization=sum(utilizations) / len(utilizations) if utilizations else None,
        **counts,
        **sizes,
    )


def _memory(every: Sequence[HostMemory]) -> HostMemory:
    """Return the sum of the peaks: an upper bound of what the ranks held together."""
    known = [memory.peak_pss_nbytes for memory in every if memory.peak_pss_nbytes is not None]
    return HostMemory(
        peak_pss_nbytes=sum(known) if known else None,
        peak_rss_nbytes=sum(memory.peak_rss_nbytes for memory in every),
        processes=sum(memory.processes for memory in every),
    )


def _device_memory(every: Sequence[DeviceMemory | None]) -> DeviceMemory | None:
    """Return the sum over ranks, each of which has an accelerator of its own; what is not known of all is not known."""
    known = [memory for memory in every if memory is not None]
    if not known:
        return None
    sums: dict[str, Any] = {}
    for name in (field.name for field in fields(DeviceMemory)):
        values = [getattr(memory, name) for memory in known]
        sums[name] = None if None in values else sum(values)
    return DeviceMemory(**sums)


def _rank(rank: int, record: RunRecord | None, missing: str) -> RankRecord:
    if record is None:
        return RankRecord(rank=rank, missing_reason=missing)
    totals = rates.total(loader.statistics for loader in record.loaders)
    return RankRecord(
        rank=rank,
        exit_code=record.exit_code,
        error=record.error,
        wall_s=record.wall_s,
        batches=totals.batches,
        samples=totals.samples,
        loop_s=totals.loop_s,
        loading_s=totals.loading_s,
        missing_reason=missing,
    )


def _unix_s(record: RunRecord) -> float:
    return datetime.datetime.fromisoformat(record.started).timestamp()
