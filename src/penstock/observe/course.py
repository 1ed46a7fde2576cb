"""A run's course: its timeline as series that can be drawn. Pure functions from moments to frozen series.

Counters move when a batch is handed out, so a step of five seconds shows in one moment and not in the nine before it.
Spans therefore reach from one moment at which a batch had come to another, and what was counted is spread over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.observe.timeline import Moment

_MOST_SPANS = 240
"""More than a figure of usual width can show apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A stretch of the run, and what each second of it was, on average."""

    from_s: float
    """Since the run's start."""

    to_s: float
    """Likewise."""

    step: float
    """Share of the time in the program's own step, between 0 and 1."""

    waiting: float
    """Share in which a loop waited for data; without workers: made it."""

    transport: float
    """Share for giving out work and taking in batches."""

    outside: float
    """Share that was spent in no loop over a loader."""

    reading: float
    """Workers busy in the dataset, on average."""

    collating: float
    """Workers busy with putting samples together, on average."""

    workers: int
    """Workers there were, at its end."""

    samples_per_s: float
    """Of wall clock."""

    device_busy: float | None
    """Share of the time in which the device ran something; None where nobody can tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """A run over time."""

    spans: tuple[Span, ...] = ()
    """One after the other, without gaps; at least two, or none."""

    moments: tuple[Moment, ...] = ()
    """What queues and memory are read from; at least two, or none."""

    @property
    def has_device(self) -> bool:
        """Whether device memory was seen."""
        return any(moment.device_nbytes is not None for moment in self.moments)


def course_of(moments: Sequence[Moment]) -> Course:
    """Return the course that `moments` tell of; an empty one where they are too few to draw a line through."""
    if len(moments) < 2:
        return Course()
    spans = tuple(_span(stretch[0], stretch[-1], stretch[1:]) for stretch in _stretches([Moment(at_s=0.0), *moments]))
    return Course(spans=spans if len(spans) > 1 else (), moments=tuple(moments))


def _stretches(moments: Sequence[Moment]) -> list[list[Moment]]:
    """Cut at moments at which a batch had come, no more often than can be seen; ends are shared by neighbours."""
    least_s = moments[-1].at_s / _MOST_SPANS
    found: list[list[Moment]] = []
    current = [moments[0]]
    for moment in moments[1:]:
        if moment.at_s <= current[-1].at_s:
            continue  # the same time twice
        current.append(moment)
        if moment.batches > current[0].batches and moment.at_s - current[0].at_s >= least_s:
            found.append(current)
            current = [moment]
    if len(current) > 1:
        found.append(current)
    return found


def _span(first: Moment, last: Moment, inside: Sequence[Moment]) -> Span:
    seconds = last.at_s - first.at_s
    counted = last.stages
    before = first.stages
    step_s = max(0.0, counted.step_s - before.step_s)
    transport_s = max(0.0, counted.transport_s - before.transport_s)
    waiting_s = max(0.0, last.loading_s - first.loading_s - transport_s)
    whole_s = max(seconds, step_s + transport_s + waiting_s)  # loops inside of loops count the same second twice
    step, waiting, transport = step_s / whole_s, waiting_s / whole_s, transport_s / whole_s
    busy = [moment.device_busy for moment in inside if moment.device_busy is not None]
    return Span(
        from_s=first.at_s,
        to_s=last.at_s,
        step=step,
        waiting=waiting,
        transport=transport,
        outside=max(0.0, 1.0 - step - waiting - transport),
        reading=max(0.0, counted.fetch_s - before.fetch_s) / seconds,
        collating=max(0.0, counted.collate_s - before.collate_s) / seconds,
        workers=last.workers,
        samples_per_s=max(0, last.samples - first.samples) / seconds,
        device_busy=sum(busy) / len(busy) if busy else None,
    )
