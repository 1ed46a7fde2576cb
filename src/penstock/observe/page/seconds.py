"""Where each second went: bars whose parts add up to a whole that a person can check with a clock."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.observe import rates
from penstock.observe.record import LoaderRecord, RunRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a bar."""

    label: str
    """What it is called."""

    role: str
    """Its colour in the palette."""

    seconds: float
    """Its length."""

    meaning: str
    """In a few words, what counts as it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Some seconds, and what they were spent on."""

    label: str
    """Whose seconds."""

    note: str
    """What adds up to what."""

    parts: tuple[Part, ...]
    """What they were spent on; none of them empty."""

    @property
    def seconds(self) -> float:
        """The whole."""
        return sum(part.seconds for part in self.parts)


def bars(record: RunRecord) -> tuple[Bar, ...]:
    """Return a bar for the training process and one for all workers, as far as there was anything."""
    used = [loader for loader in record.loaders if loader.statistics.batches]
    found = [_process_bar(record, used), _workers_bar(used)]
    return tuple(bar for bar in found if bar is not None)


def _process_bar(record: RunRecord, used: list[LoaderRecord]) -> Bar | None:
    every = [loader.statistics for loader in used]
    if not every:
        return None
    inline = [one for one in every if one.body == "inline"]
    waiting_s = sum(one.stages.wait_s for one in every)
    loop_s = sum(map(rates.loop_s, every))
    parts = (
        Part(
            label="step",
            role="step",
            seconds=sum(one.stages.step_s for one in every),
            meaning="the program's own work between two batches",
        ),
        Part(
            label="waiting for data",
            role="waiting",
            seconds=waiting_s,
            meaning="the next batch was not ready: the stall",
        ),
        Part(
            label="reading and decoding",
            role="fetch",
            seconds=sum(one.stages.fetch_s for one in inline),
            meaning="in the dataset, without workers: the step waits",
        ),
        Part(
            label="collating",
            role="collate",
            seconds=sum(one.stages.collate_s for one in inline),
            meaning="samples into a batch, without workers: the step waits",
        ),
        Part(
            label="transport",
            role="transport",
            seconds=sum(one.stages.transport_s for one in every),
            meaning="giving out work, taking in batches",
        ),
        Part(
            label="outside of loops",
            role="outside",
            seconds=max(0.0, record.wall_s - loop_s),
            meaning="imports, set-up, saving, everything that is no loop over a loader",
        ),
    )
    overlap = loop_s > record.wall_s * 1.02
    note = "Loops ran inside of one another or side by side, so that this is more than the clock's." if overlap else ""
    return _bar("The training process", note or "These add up to the run's wall clock.", parts)


def _workers_bar(used: list[LoaderRecord]) -> Bar | None:
    every = [loader.statistics for loader in used if loader.statistics.body != "inline" and loader.statistics.workers]
    if not every:
        return None
    fetch_s, collate_s = (sum(getattr(one.stages, name) for one in every) for name in ("fetch_s", "collate_s"))
    there_s = sum(one.workers * rates.loop_s(one) for one in every)
    parts = (
        Part(label="reading and decoding", role="fetch", seconds=fetch_s, meaning="inside of the dataset"),
        Part(label="collating", role="collate", seconds=collate_s, meaning="samples into a batch, into its slot"),
        Part(
            label="idle",
            role="idle",
            seconds=max(0.0, there_s - fetch_s - collate_s),
            meaning="nothing to do: as many batches as allowed were ready, or there was no core to run on",
        ),
    )
    return _bar("All workers together", "Seconds of all workers, while their loops ran.", parts)


def _bar(label: str, note: str, parts: tuple[Part, ...]) -> Bar | None:
    kept = tuple(part for part in parts if part.seconds > 0)
    return Bar(label=label, note=note, parts=kept) if kept else None
