"""How the seconds of a run were spent: bars whose parts add up to the wall clock."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.observe.record import rates
from penstock.observe.record.run_record import LoaderRecord, RunRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One segment of a bar."""

    label: str
    """Its label."""

    role: str
    """Its colour in the palette."""

    seconds: float
    """Its length in seconds."""

    meaning: str
    """What counts as this part, in a few words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """The seconds of the training process or of the workers."""

    label: str
    """Whose seconds they are."""

    note: str
    """What the parts add up to."""

    parts: tuple[Part, ...]
    """What they were spent on, without empty parts."""

    @property
    def seconds(self) -> float:
        """The sum of the parts."""
        return sum(part.seconds for part in self.parts)


def bars(record: RunRecord) -> tuple[Bar, ...]:
    """Return a bar for the training process and one for all workers; neither if no batch was loaded."""
    used = [loader for loader in record.loaders if loader.statistics.batches]
    found = [_process_bar(record, used), _workers_bar(used)]
    return tuple(bar for bar in found if bar is not None)


def _process_bar(record: RunRecord, used: list[LoaderRecord]) -> Bar | None:
    every = [loader.statistics for loader in used]
    if not every:
        return None
    inline = [one for one in every if one.worker_type == "inline"]
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
            meaning="the next batch was not ready",
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
            meaning="dispatching tasks, receiving batches",
        ),
        Part(
            label="outside of loops",
            role="outside",
            seconds=max(0.0, record.wall_s - loop_s),
            meaning="imports, set-up, saving, everything outside of loops over a loader",
        ),
    )
    overlap = loop_s > record.wall_s * 1.02
    nested = "Loops were nested or ran at the same time, so the sum exceeds the wall clock."
    return _bar("The training process", nested if overlap else "These add up to the run's wall clock.", parts)


def _workers_bar(used: list[LoaderRecord]) -> Bar | None:
    every = [
        loader.statistics for loader in used if loader.statistics.worker_type != "inline" and loader.statistics.workers
    ]
    if not every:
        return None
    fetch_s, collate_s = (sum(getattr(one.stages, name) for one in every) for name in ("fetch_s", "collate_s"))
    total_s = sum(one.workers * rates.loop_s(one) for one in every)
    parts = (
        Part(label="reading and decoding", role="fetch", seconds=fetch_s, meaning="inside of the dataset"),
        Part(label="collating", role="collate", seconds=collate_s, meaning="samples into a batch, into its slot"),
        Part(
            label="idle",
            role="idle",
            seconds=max(0.0, total_s - fetch_s - collate_s),
            meaning="no task: the allowed number of batches was ready; or no free core",
        ),
    )
    return _bar("All workers together", "Seconds of all workers, while their loops ran.", parts)


def _bar(label: str, note: str, parts: tuple[Part, ...]) -> Bar | None:
    kept = tuple(part for part in parts if part.seconds > 0)
    return Bar(label=label, note=note, parts=kept) if kept else None
