"""The content of the page as data: turns a run into a `View`, without HTML or figures."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.core.units import size_text
from penstock.observe.record.finding import Finding
from penstock.observe.record.formatting import count_text, percent_text, rate_text, time_text, uploads_text
from penstock.observe.record.group_loaders import group_loaders, iterator_text, settings_text
from penstock.observe.record.memory_parts import device_memory_bar
from penstock.observe.record.run_record import LoaderRecord, RunRecord
from penstock.observe.record.run_summary import summarize_run
from penstock.observe.record.time_parts import Bar, bars
from penstock.observe.record.time_series import TimeSeries, build_time_series
from penstock.observe.report.headline import Headline, headline

_EARLY_END = Headline(text="The program did not end by itself; the figures are of a part of it.", more="", tone="plain")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One of the figures at the top of the page."""

    label: str
    """What the figure is."""

    value: str
    """The figure, with its unit."""

    note: str = ""
    """An explanation in a few words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FindingText:
    """A finding as text."""

    cause: str
    """The problem."""

    evidence: str
    """The measurements that show it."""

    remedy: str
    """What to change; empty if there is nothing to do."""

    gain: str
    """The gain, and whether it was measured; empty where unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderView:
    """One loader, or several that are alike."""

    name: str
    """Its dataset's name."""

    batches: str
    """Their number."""

    samples: str
    """Their number."""

    rate: str
    """Samples per second of loop."""

    stall_fraction: float
    """Fraction of its loops' time, between 0 and 1."""

    first_batch: str
    """Time to the first batch."""

    facts: tuple[tuple[str, str], ...]
    """Settings and statistics, as name and value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The content of the page."""

    title: str
    """The command."""

    when: str
    """Its start and duration."""

    failure: str
    """What ended it; empty if it ended normally."""

    headline: Headline
    """The main result."""

    tiles: tuple[Tile, ...]
    """The figures at the top."""

    bars: tuple[Bar, ...]
    """How the seconds were spent."""

    device_memory: Bar | None
    """What the accelerators' memory held at its peak; None without one."""

    findings: tuple[FindingText, ...]
    """The most expensive one first."""

    series: TimeSeries
    """The run over time."""

    loaders: tuple[LoaderView, ...]
    """Loaders that handed out a batch, grouped; see group_loaders.py."""

    machine: tuple[tuple[str, str], ...]
    """Name and value."""


def build_view(record: RunRecord) -> View:
    """Return the content of the page for `record`."""
    return View(
        title=" ".join(record.command) or "a run",
        when=f"{record.started.replace('T', ' ').replace('+00:00', ' UTC')} · {time_text(record.wall_s)}",
        failure=_failure(record),
        headline=_EARLY_END if record.has_failed else _headline(record),
        tiles=_tiles(record),
        bars=bars(record),
        device_memory=device_memory_bar(record.device_memory) if record.device_memory is not None else None,
        findings=() if record.has_failed else tuple(map(_finding_text, record.findings)),
        series=build_time_series(record.timeline),
        loaders=tuple(map(_loader_view, group_loaders(record.loaders))),
        machine=_machine(record),
    )


def _headline(record: RunRecord) -> Headline:
    """Return the main result, with that of `--baseline` after it."""
    head = headline(record)
    if record.baseline is None:
        return head
    return replace(head, more=f"{head.more} Compared with torch's own loader: {record.baseline.verdict()}.")


def _failure(record: RunRecord) -> str:
    if record.error:
        return f"The program was ended by {record.error}"
    return f"The program ended with exit code {record.exit_code}." if record.exit_code else ""


def _tiles(record: RunRecord) -> tuple[Tile, ...]:
    summary, totals = summarize_run(record, ""), record.totals
    memory = record.memory
    found = []
    if totals.batches:
        found += [
            Tile(label="throughput", value=count_text(totals.samples_per_s), note="samples per second of loop"),
            Tile(label="waited for data", value=percent_text(totals.stall_fraction), note="of the time in loops"),
            Tile(label="samples", value=count_text(totals.samples), note=f"in {count_text(totals.batches)} batches"),
            Tile(label="loop, per batch", value=time_text(summary.batch_s or 0.0), note="step and loading"),
        ]
    if memory.peak_pss_nbytes:
        note = f"{memory.processes} process{'es' if memory.processes > 1 else ''} at most, sampled"
        found.append(Tile(label="peak host memory", value=size_text(memory.peak_pss_nbytes), note=note))
    elif memory.peak_rss_nbytes:
        found.append(Tile(label="peak host memory", value=size_text(memory.peak_rss_nbytes), note="this process alone"))
    device = record.device_memory
    if device is not None:
        total = f"of {size_text(device.total_nbytes)}" if device.total_nbytes else "of tensors"
        found.append(Tile(label="peak device memory", value=size_text(device.peak_nbytes), note=total))
    return tuple(found)


def _finding_text(finding: Finding) -> FindingText:
    return FindingText(cause=finding.cause, evidence=finding.evidence, remedy=finding.remedy, gain=finding.gain_text)


def _loader_view(loader: LoaderRecord) -> LoaderView:
    statistics = loader.statistics
    facts = [("iterator", iterator_text(loader)), ("settings", settings_text(loader))]
    if statistics.dispatch:
        facts.append(("dispatch", f"{statistics.dispatch.replace('_', ' ')}: {statistics.dispatch_reason}"))
    if statistics.uploads:
        facts.append(("copied to the device", uploads_text(statistics.uploads, statistics.copy_wait_s)))
    facts += [
        ("pinned", statistics.pinning),
        ("slots", _slots(loader)),
        ("workers replaced", str(statistics.restarts or "")),
        ("samples skipped", str(statistics.skipped or "")),
        ("samples that killed workers", ", ".join(map(str, statistics.quarantined[:8]))),
    ]
    return LoaderView(
        name=loader.label,
        batches=count_text(statistics.batches),
        samples=count_text(statistics.samples),
        rate=rate_text(statistics.samples_per_s),
        stall_fraction=statistics.stall_fraction,
        first_batch=time_text(statistics.first_batch_s),
        facts=tuple((name, value) for name, value in facts if value),
    )


def _slots(loader: LoaderRecord) -> str:
    ring = loader.statistics.ring
    words = [size_text(ring.nbytes)] if ring.nbytes else []
    if ring.copied_out:
        words.append(f"{ring.copied_out} batches copied out, because the program held all slots of the ring")
    return "; ".join(words)


def _machine(record: RunRecord) -> tuple[tuple[str, str], ...]:
    labels = {"processor": "processor", "cores": "cores", "memory_nbytes": "memory", "system": "system"}
    found = [("usable cores", str(record.cpus))]
    for key, value in record.machine.items():
        text = size_text(value) if key.endswith("_nbytes") and isinstance(value, int) else str(value)
        found.append((labels.get(key, key), text))
    found += [(name, version) for name, version in record.versions.items() if version]
    return tuple(found)
