"""A run's timeline as series that can be drawn. Pure functions from points to frozen series.

Counters change when a batch is handed out, so a step of five seconds shows in one point and not in the nine before it.
Spans therefore begin and end at points where a new batch was counted, and averages are taken over whole spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.observe.record.timeline import TimelinePoint

_MAX_SPANS = 240
"""More than a figure of usual width can resolve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """An interval of the run, with averages over it."""

    from_s: float
    """Seconds since the run's start."""

    to_s: float
    """Likewise."""

    step: float
    """Fraction of the time in the program's own step, between 0 and 1."""

    waiting: float
    """Fraction in which a loop waited for data, as in `LoaderStatistics.loading_s`."""

    outside: float
    """Fraction outside of loops over a loader."""

    reading: float
    """Mean number of workers busy in the dataset; with `collating`, never more than there are."""

    collating: float
    """Mean number of workers busy with collating."""

    workers: int
    """The largest number of workers that was seen in it."""

    samples_per_s: float
    """Per second of wall clock."""

    device_utilization: float | None
    """Fraction of the time in which the device ran a kernel; None where unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSeries:
    """A run over time."""

    spans: tuple[Span, ...] = ()
    """Consecutive, without gaps; at least two, or none."""

    points: tuple[TimelinePoint, ...] = ()
    """The timeline, for gauges such as queues and memory; at least two, or none."""


def build_time_series(points: Sequence[TimelinePoint]) -> TimeSeries:
    """Return the time series of a timeline; an empty one if it has fewer than two points."""
    if len(points) < 2:
        return TimeSeries()
    groups = _cut_at_batches([TimelinePoint(at_s=0.0), *points])
    spans = _move_work([_span(group[0], group[-1], group[1:]) for group in groups])
    return TimeSeries(spans=spans if len(spans) > 1 else (), points=tuple(points))


def _cut_at_batches(points: Sequence[TimelinePoint]) -> list[list[TimelinePoint]]:
    """Cut at points with a new batch, into `_MAX_SPANS` groups at most; neighbours share their end point."""
    min_s = points[-1].at_s / _MAX_SPANS
    found: list[list[TimelinePoint]] = []
    current = [points[0]]
    for point in points[1:]:
        if point.at_s <= current[-1].at_s:
            continue  # the same time twice
        current.append(point)
        if point.batches > current[0].batches and point.at_s - current[0].at_s >= min_s:
            found.append(current)
            current = [point]
    if len(current) > 1:
        found.append(current)
    return found


def _span(first: TimelinePoint, last: TimelinePoint, inside: Sequence[TimelinePoint]) -> Span:
    seconds = last.at_s - first.at_s
    counted = last.stages
    before = first.stages
    step_s = max(0.0, counted.step_s - before.step_s)
    waiting_s = max(0.0, last.loading_s - first.loading_s)
    whole_s = max(seconds, step_s + waiting_s)  # loops in several threads count the same second twice
    step, waiting = step_s / whole_s, waiting_s / whole_s
    utilizations = [point.device_utilization for point in inside if point.device_utilization is not None]
    return Span(
        from_s=first.at_s,
        to_s=last.at_s,
        step=step,
        waiting=waiting,
        outside=max(0.0, 1.0 - step - waiting),
        reading=max(0.0, counted.fetch_s - before.fetch_s) / seconds,
        collating=max(0.0, counted.collate_s - before.collate_s) / seconds,
        workers=max(point.workers for point in inside),
        samples_per_s=max(0, last.samples - first.samples) / seconds,
        device_utilization=sum(utilizations) / len(utilizations) if utilizations else None,
    )


def _move_work(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Move work of workers that no span has room for into the span before it, where it was done.

    Counters move when a batch is handed out, and a batch that was made ahead was made in earlier spans. What the first
    span has no room for is left out.
    """
    found = []
    read_s = collated_s = 0.0
    most = max((span.workers for span in spans), default=0)
    for span in reversed(spans):
        seconds = span.to_s - span.from_s
        read_s += span.reading * seconds
        collated_s += span.collating * seconds
        work_s, room_s = read_s + collated_s, (span.workers or most) * seconds
        done = min(1.0, room_s / work_s) if most and work_s else 1.0
        found.append(replace(span, reading=read_s * done / seconds, collating=collated_s * done / seconds))
        read_s, collated_s = read_s * (1 - done), collated_s * (1 - done)
    return tuple(reversed(found))
