"""Several ranks' records as one: what they counted is put side by side, what they held at the same time is added up."""

from __future__ import annotations

import datetime
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.observe import rates
from penstock.observe.host_memory import HostMemory
from penstock.observe.rank_record import RankRecord
from penstock.observe.record import RunRecord
from penstock.observe.timeline import Moment

_COUNTS = ("batches", "samples", "nbytes", "loading_s", "ready", "held", "workers", "working", "slots_nbytes")
_SIZES = ("host_nbytes", "device_nbytes", "device_reserved_nbytes")


def merged(records: Mapping[int, RunRecord], missing: Mapping[int, str]) -> RunRecord:
    """Return the record of all ranks.

    Args:
        records: what is known, by rank; one at least.
        missing: of which ranks something is missing, and why, in words; those of `records` too.
    """
    ranks = sorted({*records, *missing})
    lowest = records[min(records)]
    codes = [record.exit_code for _, record in sorted(records.items())]
    failed = [code for code in codes if code]
    began = {rank: _unix_s(record) for rank, record in records.items()}
    earliest = min(began, key=lambda rank: began[rank])
    return replace(
        lowest,
        started=records[earliest].started,
        wall_s=max(began[rank] - began[earliest] + record.wall_s for rank, record in records.items()),
        exit_code=failed[0] if failed else None if None in codes or set(ranks) > set(records) else 0,
        error=next((f"rank {rank}: {record.error}" for rank, record in sorted(records.items()) if record.error), None),
        memory=_memory([record.memory for record in records.values()]),
        loaders=tuple(
            replace(loader, rank=rank) for rank, record in sorted(records.items()) for loader in record.loaders
        ),
        timeline=together([(began[rank] - began[earliest], record.timeline) for rank, record in records.items()]),
        ranks=tuple(_rank(rank, records.get(rank), missing.get(rank, "")) for rank in ranks),
    )


def together(timelines: Sequence[tuple[float, Sequence[Moment]]]) -> tuple[Moment, ...]:
    """Return one timeline, with a moment for each of the longest one's, of what all had counted by then.

    Args:
        timelines: each with the seconds by which it began after the first.
    """
    placed = [([moment.at_s + later_s for moment in moments], moments) for later_s, moments in timelines if moments]
    if not placed:
        return ()
    times, _ = max(placed, key=lambda one: one[0][-1])
    return tuple(
        _sum(at_s, [moments[number - 1] for ats, moments in placed if (number := bisect_right(ats, at_s))])
        for at_s in times
    )


def _sum(at_s: float, moments: Sequence[Moment]) -> Moment:
    counts: dict[str, Any] = {name: sum(getattr(moment, name) for moment in moments) for name in _COUNTS}
    sizes: dict[str, Any] = {}
    for name in _SIZES:
        known = [value for moment in moments if (value := getattr(moment, name)) is not None]
        sizes[name] = sum(known) if known else None
    busy = [moment.device_busy for moment in moments if moment.device_busy is not None]
    return Moment(
        at_s=at_s,
        stages=rates.total_stages(moment.stages for moment in moments),
        device_busy=sum(busy) / len(busy) if busy else None,
        **counts,
        **sizes,
    )


def _memory(every: Sequence[HostMemory]) -> HostMemory:
    """Return the sum of the peaks, which is the most that the ranks may have held together."""
    known = [memory.peak_pss_nbytes for memory in every if memory.peak_pss_nbytes is not None]
    return HostMemory(
        peak_pss_nbytes=sum(known) if known else None,
        peak_rss_nbytes=sum(memory.peak_rss_nbytes for memory in every),
        processes=sum(memory.processes for memory in every),
    )


def _rank(rank: int, record: RunRecord | None, missing: str) -> RankRecord:
    if record is None:
        return RankRecord(rank=rank, missing=missing)
    every = [loader.statistics for loader in record.loaders]
    return RankRecord(
        rank=rank,
        exit_code=record.exit_code,
        error=record.error,
        wall_s=record.wall_s,
        batches=sum(one.batches for one in every),
        samples=sum(one.samples for one in every),
        loop_s=sum(map(rates.loop_s, every)),
        loading_s=sum(map(rates.loading_s, every)),
        missing=missing,
    )


def _unix_s(record: RunRecord) -> float:
    return datetime.datetime.fromisoformat(record.started).timestamp()
