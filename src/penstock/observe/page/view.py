"""What the page shows, as data: `view_of` turns a run into a `View`. No HTML and no figure is made here."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.units import size_text
from penstock.observe import compare, rates
from penstock.observe.alike import merged, settings_text
from penstock.observe.compare import Comparison
from penstock.observe.course import Course, course_of
from penstock.observe.finding import Finding
from penstock.observe.page.headline import Headline, headline
from penstock.observe.page.seconds import Bar, bars
from penstock.observe.record import LoaderRecord, RunRecord
from penstock.observe.wording import count_text, rate_text, ratio_text, share_text, time_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One figure that a person looks for first."""

    label: str
    """What it is."""

    value: str
    """The figure, with its unit."""

    note: str = ""
    """What to know about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remark:
    """A finding, in words."""

    cause: str
    """What is the matter."""

    evidence: str
    """How that is known."""

    remedy: str
    """What to change; empty when nothing is to be done."""

    gain: str
    """How much it would bring, and how that is known; empty where nobody can tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderView:
    """One loader, or several that are alike."""

    name: str
    """Of its dataset."""

    batches: str
    """How many."""

    samples: str
    """How many."""

    rate: str
    """Samples per second of loop."""

    waited_share: float
    """Of its loops' time, between 0 and 1."""

    first_batch: str
    """How long it took."""

    facts: tuple[tuple[str, str], ...]
    """Settings and what the loader says of itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Against:
    """The comparison, in words."""

    name: str
    """What the run is compared with."""

    verdict: str
    """One sentence."""

    rows: tuple[compare.Row, ...]
    """The figures."""

    settings: tuple[compare.Difference, ...]
    """Settings that differ."""

    caveats: tuple[str, ...]
    """What makes the two not comparable."""

    rates: tuple[float, float]
    """Samples per second, here and there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """All that the page shows."""

    title: str
    """The command."""

    when: str
    """When it ran and how long."""

    failure: str
    """What ended it; empty when it ended well."""

    headline: Headline
    """What to remember."""

    tiles: tuple[Tile, ...]
    """The figures that are looked for first."""

    bars: tuple[Bar, ...]
    """Where each second went."""

    remarks: tuple[Remark, ...]
    """What was found, what costs most first."""

    course: Course
    """The run over time."""

    against: Against | None
    """What it is compared with."""

    loaders: tuple[LoaderView, ...]
    """Loaders that handed out a batch, alike ones as one."""

    machine: tuple[tuple[str, str], ...]
    """Name and value."""


def view_of(record: RunRecord, against: Comparison | None = None) -> View:
    """Return what the page shows of `record`, compared with `against` if that is given."""
    return View(
        title=" ".join(record.command) or "a run",
        when=f"{record.started.replace('T', ' ').replace('+00:00', ' UTC')} · {time_text(record.wall_s)}",
        failure=_failure(record),
        headline=headline(record),
        tiles=_tiles(record),
        bars=bars(record),
        remarks=tuple(map(_remark, record.findings)),
        course=course_of(record.timeline),
        against=_against(record, against) if against is not None else None,
        loaders=tuple(map(_loader, merged(record.loaders))),
        machine=_machine(record),
    )


def _failure(record: RunRecord) -> str:
    if record.error:
        return f"The program was ended by {record.error}"
    return f"The program ended with exit code {record.exit_code}." if record.exit_code else ""


def _tiles(record: RunRecord) -> tuple[Tile, ...]:
    total = compare.as_comparison(record, "")
    every = [loader.statistics for loader in record.loaders if loader.statistics.batches]
    memory = record.memory
    found = []
    if every:
        samples, batches = sum(one.samples for one in every), sum(one.batches for one in every)
        found += [
            Tile(label="throughput", value=count_text(total.samples_per_s), note="samples per second of loop"),
            Tile(label="waited for data", value=share_text(total.waited_share), note="of the time in loops"),
            Tile(label="samples", value=count_text(samples), note=f"in {count_text(batches)} batches"),
            Tile(label="loop, per batch", value=time_text(total.batch_s or 0.0), note="step and loading"),
        ]
    if memory.peak_pss_nbytes:
        note = f"{memory.processes} process{'es' if memory.processes > 1 else ''} at most"
        found.append(Tile(label="peak host memory", value=size_text(memory.peak_pss_nbytes), note=note))
    elif memory.peak_rss_nbytes:
        found.append(Tile(label="peak host memory", value=size_text(memory.peak_rss_nbytes), note="this process alone"))
    device = [moment.device_nbytes for moment in record.timeline if moment.device_nbytes is not None]
    if device:
        found.append(Tile(label="peak device memory", value=size_text(max(device)), note="of tensors, as looked at"))
    return tuple(found)


def _remark(finding: Finding) -> Remark:
    gain = ""
    if finding.gain is not None:
        how = "measured" if finding.is_measured else "an estimate"
        gain = f"{ratio_text(finding.gain)} the speed ({how})"
    return Remark(cause=finding.cause, evidence=finding.evidence, remedy=finding.remedy, gain=gain)


def _loader(loader: LoaderRecord) -> LoaderView:
    statistics = loader.statistics
    facts = [("settings", settings_text(loader))]
    if statistics.dispatch:
        facts.append(("work is given out", f"{statistics.dispatch.replace('_', ' ')}: {statistics.dispatch_reason}"))
    if statistics.uploads:
        hidden = f"{count_text(statistics.uploads)}, {count_text(statistics.uploads_hidden)} of them in time"
        facts += [("copied to the device", hidden), ("copied ahead", statistics.prefetch)]
    facts += [
        ("pinned", statistics.pinning),
        ("slots", _slots(loader)),
        ("workers replaced", str(statistics.restarts or "")),
        ("samples skipped", str(statistics.skipped or "")),
        ("samples that killed workers", ", ".join(map(str, statistics.quarantined[:8]))),
    ]
    return LoaderView(
        name=loader.name,
        batches=count_text(statistics.batches),
        samples=count_text(statistics.samples),
        rate=rate_text(rates.samples_per_s(statistics)),
        waited_share=rates.waited_share(statistics),
        first_batch=time_text(statistics.first_batch_s),
        facts=tuple((name, value) for name, value in facts if value),
    )


def _slots(loader: LoaderRecord) -> str:
    ring = loader.statistics.ring
    words = [size_text(ring.nbytes)] if ring.nbytes else []
    if ring.copied_out:
        words.append(f"{ring.copied_out} batches copied out, because the ring was full of held ones")
    return "; ".join(words)


def _against(record: RunRecord, there: Comparison) -> Against:
    here = compare.as_comparison(record, "this run")
    return Against(
        name=there.name,
        verdict=compare.verdict(here, there),
        rows=tuple(compare.rows(here, there)),
        settings=there.settings,
        caveats=there.caveats,
        rates=(here.samples_per_s, there.samples_per_s),
    )


def _machine(record: RunRecord) -> tuple[tuple[str, str], ...]:
    labels = {"processor": "processor", "cores": "cores", "memory_nbytes": "memory", "system": "system"}
    found = [("usable cores", str(record.cpus))]
    for key, value in record.machine.items():
        text = size_text(value) if key.endswith("_nbytes") and isinstance(value, int) else str(value)
        found.append((labels.get(key, key), text))
    found += [(name, version) for name, version in record.versions.items() if version]
    return tuple(found)
