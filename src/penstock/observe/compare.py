"""Two runs side by side: what differs, by how much, and what makes them not comparable.

A `Comparison` is the other side as the reader of a report needs it. It is made from a second run by `with_run`, and
may be filled by anybody who has measured something else, a baseline with another loader, say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

from penstock.core.stats import StageTimes
from penstock.core.units import size_text
from penstock.observe import rates
from penstock.observe.alike import merged
from penstock.observe.record import LoaderRecord, RunRecord
from penstock.observe.wording import count_text, rate_text, ratio_text, share_text, time_text

_NOISE = 0.05
"""Differences of throughput below this are within what two runs of the same program differ by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Something that is not the same on both sides, in words."""

    what: str
    """As in "num_workers of Images"."""

    here: str
    """In the run that is reported."""

    there: str
    """In the other one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What a run is compared with; every figure is over all of its loops, as `rates` counts them."""

    name: str
    """What it is, as in "torch's own DataLoader" or a file's name."""

    samples_per_s: float
    """Samples per second of loop."""

    waited_share: float
    """Share of the loops' time in which the step waited for data, between 0 and 1."""

    batch_s: float | None = None
    """Seconds of loop per batch; None where it is not known."""

    stages: StageTimes | None = None
    """Seconds per batch, by stage; None where they are not known."""

    peak_host_nbytes: int | None = None
    """The most host memory of all its processes; None where it was not looked at."""

    settings: tuple[Difference, ...] = ()
    """Settings that differ."""

    caveats: tuple[str, ...] = ()
    """What makes the two not comparable, each in one sentence."""

    verdict: str = ""
    """The result in one sentence; where it is empty, one is made of the figures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of a comparison, in words."""

    what: str
    """What is compared."""

    here: str
    """In the run that is reported."""

    there: str
    """In the other one."""

    ratio: str
    """Here divided by there; a dash where that says nothing."""


def as_comparison(record: RunRecord, name: str) -> Comparison:
    """Return the figures of `record` as something to compare with."""
    every = [loader.statistics for loader in record.loaders]
    loop_s, batches = sum(map(rates.loop_s, every)), sum(one.batches for one in every)
    samples = sum(one.samples for one in every)
    memory = record.memory
    return Comparison(
        name=name,
        samples_per_s=samples / loop_s if loop_s else 0.0,
        waited_share=sum(map(rates.loading_s, every)) / loop_s if loop_s else 0.0,
        batch_s=loop_s / batches if batches else None,
        stages=_per_batch(rates.total_stages(one.stages for one in every), batches) if batches else None,
        peak_host_nbytes=memory.peak_pss_nbytes or memory.peak_rss_nbytes or None,
    )


def with_run(record: RunRecord, other: RunRecord, name: str) -> Comparison:
    """Return `other`, called `name`, as what `record` is compared with."""
    return replace(
        as_comparison(other, name), settings=_settings(record, other), caveats=tuple(_caveats(record, other))
    )


def verdict(here: Comparison, there: Comparison) -> str:
    """Return the result in one sentence."""
    if there.verdict:
        return there.verdict
    if not (here.samples_per_s and there.samples_per_s):
        return f"There is nothing to compare: {'this run' if not here.samples_per_s else there.name} loaded no samples."
    ratio = here.samples_per_s / there.samples_per_s
    waits = f"waited for data {share_text(here.waited_share)} of the time against {share_text(there.waited_share)}"
    if abs(ratio - 1) < _NOISE:
        return f"No difference that counts in throughput ({ratio_text(ratio)}) to {there.name}; this run {waits}."
    word = f"{ratio_text(ratio)} the throughput of {there.name}"
    return f"{word}; this run {waits}."


def rows(here: Comparison, there: Comparison) -> list[Row]:
    """Return the figures of both sides, line by line; what neither side knows is left out."""
    found = [
        Row(
            what="throughput",
            here=rate_text(here.samples_per_s),
            there=rate_text(there.samples_per_s),
            ratio=_ratio(here.samples_per_s, there.samples_per_s),
        ),
        Row(
            what="waited for data",
            here=share_text(here.waited_share),
            there=share_text(there.waited_share),
            ratio=_ratio(here.waited_share, there.waited_share),
        ),
        _times("loop, per batch", here.batch_s, there.batch_s),
    ]
    for name, label in STAGES.items():
        ours, theirs = (getattr(one.stages, name) if one.stages is not None else None for one in (here, there))
        found.append(_times(f"{label}, per batch", ours, theirs))
    peaks = here.peak_host_nbytes, there.peak_host_nbytes
    if any(peaks):
        found.append(
            Row(
                what="peak host memory",
                here=size_text(peaks[0]) if peaks[0] else "–",
                there=size_text(peaks[1]) if peaks[1] else "–",
                ratio=_ratio(peaks[0], peaks[1]),
            )
        )
    return [row for row in found if (row.here, row.there) != ("–", "–")]


STAGES = {
    "step_s": "step",
    "wait_s": "blocked for a batch",
    "transport_s": "transport",
    "fetch_s": "read and decode (all workers)",
    "collate_s": "collate (all workers)",
}
"""The fields of StageTimes, in the order that they matter to a reader, and what they are called."""


def render(record: RunRecord, there: Comparison, name: str) -> str:
    """Return the comparison of `record`, called `name`, as lines of plain text."""
    here = as_comparison(record, name)
    lines = [
        ("", name, there.name, "ratio"),
        *((row.what, row.here, row.there, row.ratio) for row in rows(here, there)),
    ]
    text = [f"penstock: {verdict(here, there)}", *_table(lines)]
    if there.settings:
        text += ["", "  what differs in the settings", *_table([(d.what, d.here, d.there) for d in there.settings])]
    if there.caveats:
        text += ["", "  Compare with care:", *(f"  - {caveat}" for caveat in there.caveats)]
    return "\n".join(text) + "\n"


def as_json(record: RunRecord, there: Comparison, name: str) -> dict[str, object]:
    """Return the comparison as an object that can be written as JSON."""
    here = as_comparison(record, name)
    return {
        "schema": "penstock.comparison/1",
        "verdict": verdict(here, there),
        "here": asdict(here),
        "there": asdict(there),
        "caveats": list(there.caveats),
    }


# ── what differs ────────────────────────────────────────────────────────────────────────────────────────────


def _caveats(here: RunRecord, there: RunRecord) -> list[str]:
    found = []
    if here.command != there.command:
        found.append(f"different commands: {_command(here)} and {_command(there)}")
    for run, name in ((here, "this run"), (there, "the other run")):
        if run.exit_code or run.error:
            found.append(f"{name} ended early: {run.error or f'exit code {run.exit_code}'}")
    for word, counts in (
        ("samples", [sum(loader.statistics.samples for loader in run.loaders) for run in (here, there)]),
        ("batches", [sum(loader.statistics.batches for loader in run.loaders) for run in (here, there)]),
    ):
        if counts[0] != counts[1]:
            found.append(f"different numbers of {word}: {count_text(counts[0])} and {count_text(counts[1])}")
    if here.cpus != there.cpus:
        found.append(f"different numbers of usable cores: {here.cpus} and {there.cpus}")
    found += [f"different machines: {text}" for text in _unlike(here.machine, there.machine)]
    found += [f"different versions: {text}" for text in _unlike(here.versions, there.versions)]
    datasets = [sorted({loader.name.partition(" #")[0] for loader in run.loaders}) for run in (here, there)]
    if datasets[0] != datasets[1]:
        found.append(f"different datasets: {_few(datasets[0])} and {_few(datasets[1])}")
    return found


def _unlike(here: Mapping[str, object], there: Mapping[str, object]) -> list[str]:
    """Return what two mappings disagree on, where both know it."""
    return [
        f"{key.removesuffix('_nbytes')} {_value(key, here[key])} and {_value(key, there[key])}"
        for key in here
        if key in there and here[key] != there[key]
    ]


def _value(key: str, value: object) -> str:
    return size_text(value) if key.endswith("_nbytes") and isinstance(value, int) else str(value)


def _settings(here: RunRecord, there: RunRecord) -> tuple[Difference, ...]:
    """Return the settings that differ between loaders of the same name; the first of a name stands for all."""
    found = []
    theirs = _by_name(there)
    for name, loader in _by_name(here).items():
        other = theirs.get(name)
        if other is None:
            continue
        ours, others = _all_settings(loader), _all_settings(other)
        keys = [*ours, *(key for key in others if key not in ours)]
        found += [
            Difference(what=f"{key} of {name}", here=str(ours.get(key, "–")), there=str(others.get(key, "–")))
            for key in keys
            if ours.get(key) != others.get(key)
        ]
    return tuple(found)


def _by_name(record: RunRecord) -> dict[str, LoaderRecord]:
    found: dict[str, LoaderRecord] = {}
    for loader in merged(record.loaders):
        found.setdefault(loader.name.partition(" and ")[0], loader)
    return found


def _all_settings(loader: LoaderRecord) -> dict[str, object]:
    statistics = loader.statistics
    return {**loader.settings, "body": statistics.body, "start_method": statistics.start_method or "–"}


# ── words ───────────────────────────────────────────────────────────────────────────────────────────────────


def _per_batch(stages: StageTimes, batches: int) -> StageTimes:
    return StageTimes(**{field.name: getattr(stages, field.name) / batches for field in fields(StageTimes)})


def _times(what: str, here: float | None, there: float | None) -> Row:
    texts = ["–" if seconds is None else time_text(seconds) for seconds in (here, there)]
    return Row(what=what, here=texts[0], there=texts[1], ratio=_ratio(here, there))


def _ratio(here: float | None, there: float | None) -> str:
    return ratio_text(here / there) if here is not None and there else "–"


def _command(record: RunRecord) -> str:
    return " ".join(record.command) or "nothing"


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "") or "none"


def _table(lines: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  "
        + "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
