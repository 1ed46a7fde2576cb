"""What the time of loops went into, as parts that add up: for the terminal's report and for the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.core.stats import LoaderStatistics
from penstock.observe.record import rates
from penstock.observe.record.formatting import percent_digits, percent_texts, time_text
from penstock.observe.record.run_record import LoaderRecord, RunRecord

Waiting = Literal["start", "unknown", "fetch", "collate", "transport"]
"""What a step waited for: workers that start, an iterator that is not penstock's, or a stage of loading."""

_MOSTLY = 0.5
"""Of the waiting; what starting workers takes is also counted as waiting, or as transport."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of something that was used up: of the time, or of memory."""

    label: str
    """Its label."""

    role: str
    """Its colour in the page's palette."""

    amount: float
    """Its seconds, or its bytes."""

    text: str
    """Its amount with its unit."""

    share: str
    """Its share of the whole as text; the shares of one `Bar` add up to 100 %, as do those of `parts` to this one."""

    meaning: str
    """What counts as this part, in a few words."""

    parts: tuple[Part, ...] = ()
    """What it consists of; empty where that is one thing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """The seconds of the training process or of the workers, or the memory of devices."""

    label: str
    """Whose they are."""

    text: str
    """How much they are together."""

    note: str
    """What the parts add up to."""

    parts: tuple[Part, ...]
    """What they were spent on, without empty parts."""

    @property
    def amount(self) -> float:
        """The sum of the parts."""
        return sum(part.amount for part in self.parts)


def bars(record: RunRecord) -> tuple[Bar, ...]:
    """Return a bar for the training process and one for all workers; neither if no batch was loaded."""
    every = (
        ("The loop of the training process", _outside(record), loop_parts(record.loaders)),
        ("All workers together", "The seconds of all workers while their loops ran.", worker_parts(record.loaders)),
    )
    return tuple(
        Bar(label=label, text=time_text(sum(part.amount for part in parts)), note=note, parts=parts)
        for label, note, parts in every
        if parts
    )


def loop_parts(loaders: Sequence[LoaderRecord]) -> tuple[Part, ...]:
    """Return the step and the waiting of loops over these loaders; together they are the loops' time."""
    every = [loader.statistics for loader in loaders]
    totals = rates.total(every)
    if not totals.loop_s:
        return ()
    step_s, whole_s = totals.stages.step_s, totals.loop_s
    waited = totals.loading_s / whole_s
    shares = percent_texts([1 - waited, waited])
    digits = percent_digits(waited)
    return _without_empty(
        Part(
            label="step",
            role="step",
            amount=step_s,
            text=time_text(step_s),
            share=shares[0],
            meaning="the program's own work between two batches",
        ),
        Part(
            label="waiting for data",
            role="waiting",
            amount=totals.loading_s,
            text=time_text(totals.loading_s),
            share=shares[1],
            meaning="the step could not begin",
            parts=_waiting_parts(every, totals, whole_s, digits),
        ),
    )


def _waiting_parts(
    every: Sequence[LoaderStatistics], totals: rates.Totals, whole_s: float, digits: int
) -> tuple[Part, ...]:
    inline = [one.stages for one in every if one.worker_type == "inline"]
    seconds = {
        "not ready": ("waiting", totals.stages.wait_s, "the next batch was not made yet"),
        "read+decode": ("fetch", sum(one.fetch_s for one in inline), "in the dataset, without workers"),
        "collate": ("collate", sum(one.collate_s for one in inline), "samples into a batch, without workers"),
        "transport": ("transport", totals.stages.transport_s, "dispatching tasks, receiving batches"),
        "workers": ("outside", totals.stages.workers_s, "starting and stopping workers"),
    }
    parts = parts_of(whole_s, seconds, time_text, digits)
    return () if [part.label for part in parts] == ["not ready"] else parts


def worker_parts(loaders: Sequence[LoaderRecord]) -> tuple[Part, ...]:
    """Return what the workers of these loaders did while loops ran; nothing where there are none, or none is known."""
    every = [
        loader.statistics
        for loader in loaders
        if loader.statistics.worker_type != "inline" and loader.statistics.workers and not loader.is_watched
    ]
    stages = rates.total_stages(one.stages for one in every)
    busy_s = stages.fetch_s + stages.collate_s
    whole_s = max(busy_s, sum(one.workers * one.loop_s for one in every))
    if not whole_s:
        return ()
    seconds = {
        "read+decode": ("fetch", stages.fetch_s, "inside of the dataset"),
        "collate": ("collate", stages.collate_s, "samples into a batch, into its slot"),
        "idle": ("idle", whole_s - busy_s, "no task: the allowed number of batches was ready; or no free core"),
    }
    return parts_of(whole_s, seconds, time_text)


def parts_of(
    whole: float,
    amounts: Mapping[str, tuple[str, float, str]],
    text: Callable[[float], str],
    digits: int | None = None,
) -> tuple[Part, ...]:
    """Return the parts of a whole that are not empty.

    Args:
        whole: of what their shares are.
        amounts: role, amount and meaning of each, by label.
        text: an amount with its unit.
        digits: see `percent_texts`.
    """
    shares = percent_texts([amount / whole for _, amount, _ in amounts.values()], digits)
    return _without_empty(
        *(
            Part(label=label, role=role, amount=amount, text=text(amount), share=share, meaning=meaning)
            for (label, (role, amount, meaning)), share in zip(amounts.items(), shares, strict=True)
        )
    )


def most_waited_for(loaders: Sequence[LoaderRecord]) -> LoaderRecord:
    """Return the loader whose loops waited longest."""
    return max(loaders, key=lambda loader: loader.statistics.loading_s)


def cause_of_waiting(loader: LoaderRecord) -> Waiting:
    """Return what the step waited for most in loops over `loader`, as the parts of its waiting show it."""
    counted, stages = loader.statistics, loader.statistics.stages
    if loader.is_watched:
        return "unknown"
    if counted.worker_type == "inline":
        parts: dict[Waiting, float] = {"fetch": stages.fetch_s, "collate": stages.collate_s}
        largest = max(parts, key=lambda part: parts[part])
        return largest if parts[largest] >= stages.transport_s else "transport"
    starting_s = max(stages.workers_s, counted.first_batch_s * max(1, counted.epochs))
    if starting_s > _MOSTLY * counted.loading_s:
        return "start"
    if stages.transport_s > stages.wait_s:
        return "transport"
    return "fetch" if stages.fetch_s >= stages.collate_s else "collate"


def _outside(record: RunRecord) -> str:
    outside_s = record.wall_s - record.totals.loop_s
    if record.ranks:
        return "Of all ranks together."
    if outside_s < -0.02 * record.wall_s:
        return "Loops ran in several threads, or in each other's steps, so the sum exceeds the wall clock."
    return f"{time_text(max(0.0, outside_s))} more were outside of loops: imports, set-up, saving."


def _without_empty(*parts: Part) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.amount > 0)
