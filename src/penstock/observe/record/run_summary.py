"""The overall figures of one run, over all of its loops: what two runs are compared by."""

from __future__ import annotations

from dataclasses import dataclass, fields

from penstock.core.stats import StageTimes
from penstock.observe.record.run_record import RunRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """Figures over all loops of a run, as rates.py defines them."""

    name: str
    """What the run is called, as in a file's name."""

    samples_per_s: float
    """Samples per second of loop."""

    stall_fraction: float
    """Fraction of the loops' time in which the step waited for data, between 0 and 1."""

    batch_s: float | None = None
    """Seconds of loop per batch; None where unknown."""

    stages: StageTimes | None = None
    """Seconds per batch, by stage; None where unknown."""

    peak_host_nbytes: int | None = None
    """Peak host memory of all its processes; None where it was not measured."""


def summarize_run(record: RunRecord, name: str) -> RunSummary:
    """Return the overall figures of `record`, called `name`."""
    totals, memory = record.totals, record.memory
    return RunSummary(
        name=name,
        samples_per_s=totals.samples_per_s,
        stall_fraction=totals.stall_fraction,
        batch_s=totals.loop_s / totals.batches if totals.batches else None,
        stages=_per_batch(totals.stages, totals.batches) if totals.batches else None,
        peak_host_nbytes=memory.peak_pss_nbytes or memory.peak_rss_nbytes or None,
    )


def _per_batch(stages: StageTimes, batches: int) -> StageTimes:
    return StageTimes(**{field.name: getattr(stages, field.name) / batches for field in fields(StageTimes)})
