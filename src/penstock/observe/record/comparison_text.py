"""A comparison of two runs as text, as rows of a table and as JSON. Data in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from penstock.core.units import size_text
from penstock.observe.record.compare_runs import Comparison
from penstock.observe.record.formatting import percent_text, rate_text, ratio_text, time_text
from penstock.observe.record.run_record import RunRecord
from penstock.observe.record.run_summary import RunSummary, summarize_run

_NOISE = 0.05
"""Relative differences of throughput below this occur between two runs of the same program."""

_UNKNOWN = "–"

_STAGES = {
    "step_s": "step",
    "wait_s": "next batch not ready",
    "transport_s": "transport",
    "workers_s": "starting and stopping workers",
    "fetch_s": "read and decode (all workers)",
    "collate_s": "collate (all workers)",
}
"""Labels of the fields of StageTimes, in the order in which they matter to a reader."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of a comparison, as text."""

    label: str
    """What is compared."""

    run: str
    """Its value in the run that is reported."""

    reference: str
    """Its value in the reference."""

    ratio: str
    """The first divided by the second; a dash where it is not known."""


def verdict(run: RunSummary, comparison: Comparison) -> str:
    """Return the result in one sentence."""
    reference = comparison.reference
    if not (run.samples_per_s and reference.samples_per_s):
        name = "this run" if not run.samples_per_s else reference.name
        return f"There is nothing to compare: {name} loaded no samples."
    ratio = run.samples_per_s / reference.samples_per_s
    waits = (
        f"waited for data {percent_text(run.stall_fraction)} of the time against "
        f"{percent_text(reference.stall_fraction)}"
    )
    if abs(ratio - 1) < _NOISE:
        return f"No significant difference in throughput ({ratio_text(ratio)}) to {reference.name}; this run {waits}."
    return f"{ratio_text(ratio)} the throughput of {reference.name}; this run {waits}."


def rows(run: RunSummary, reference: RunSummary) -> list[Row]:
    """Return the figures of both runs, row by row, without those that neither run has."""
    found = [
        Row(
            label="throughput",
            run=rate_text(run.samples_per_s),
            reference=rate_text(reference.samples_per_s),
            ratio=_ratio(run.samples_per_s, reference.samples_per_s),
        ),
        Row(
            label="waited for data",
            run=percent_text(run.stall_fraction),
            reference=percent_text(reference.stall_fraction),
            ratio=_ratio(run.stall_fraction, reference.stall_fraction),
        ),
        _time_row("loop, per batch", run.batch_s, reference.batch_s),
    ]
    for field, label in _STAGES.items():
        times = [getattr(one.stages, field) if one.stages is not None else None for one in (run, reference)]
        if any(times) or field != "workers_s":  # most loops start their workers before they begin
            found.append(_time_row(f"{label}, per batch", *times))
    found.append(_size_row("peak host memory", run.peak_host_nbytes, reference.peak_host_nbytes))
    return [row for row in found if (row.run, row.reference) != (_UNKNOWN, _UNKNOWN)]


def render(record: RunRecord, comparison: Comparison, name: str) -> str:
    """Return the comparison of `record`, called `name`, as lines of plain text."""
    run, reference = summarize_run(record, name), comparison.reference
    lines = [
        ("", name, reference.name, "ratio"),
        *((row.label, row.run, row.reference, row.ratio) for row in rows(run, reference)),
    ]
    text = [f"penstock: {verdict(run, comparison)}"]
    text += _table(lines)
    if comparison.settings:
        settings = [(one.setting, one.run, one.reference) for one in comparison.settings]
        text += ["", "  settings that differ", *_table(settings)]
    text += ["", *(f"  {line}" for line in comparison.orders.equal)] if comparison.orders.equal else []
    if comparison.caveats:
        text += ["", "  Compare with care:", *(f"  - {caveat}" for caveat in comparison.caveats)]
    return "\n".join(text) + "\n"


def as_json(record: RunRecord, comparison: Comparison, name: str) -> dict[str, object]:
    """Return the comparison as an object that can be written as JSON."""
    run = summarize_run(record, name)
    return {
        "schema": "penstock.comparison/1",
        "verdict": verdict(run, comparison),
        "run": asdict(run),
        "reference": asdict(comparison.reference),
        "settings": [asdict(difference) for difference in comparison.settings],
        "orders": asdict(comparison.orders),
        "caveats": list(comparison.caveats),
    }


def _time_row(label: str, run_s: float | None, reference_s: float | None) -> Row:
    texts = [_UNKNOWN if seconds is None else time_text(seconds) for seconds in (run_s, reference_s)]
    return Row(label=label, run=texts[0], reference=texts[1], ratio=_ratio(run_s, reference_s))


def _size_row(label: str, run_nbytes: int | None, reference_nbytes: int | None) -> Row:
    texts = [size_text(nbytes) if nbytes else _UNKNOWN for nbytes in (run_nbytes, reference_nbytes)]
    return Row(label=label, run=texts[0], reference=texts[1], ratio=_ratio(run_nbytes, reference_nbytes))


def _ratio(run: float | None, reference: float | None) -> str:
    return ratio_text(run / reference) if run is not None and reference else _UNKNOWN


def _table(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines with their columns aligned: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  "
        + "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
