"""Compares two runs: which settings differ, and what makes the runs not comparable. comparison_text.py shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.core.units import size_text
from penstock.observe.record.compare_digests import OrderComparison, compare_digests
from penstock.observe.record.formatting import count_text
from penstock.observe.record.group_loaders import group_loaders
from penstock.observe.record.run_record import LoaderRecord, RunRecord
from penstock.observe.record.run_summary import RunSummary, summarize_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A setting that two runs do not share, as text."""

    setting: str
    """As in "num_workers of Images"."""

    run: str
    """Its value in the run that is reported."""

    reference: str
    """Its value in the reference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What a run is compared with."""

    reference: RunSummary
    """The figures of the other run."""

    settings: tuple[Difference, ...] = ()
    """Settings that differ."""

    orders: OrderComparison = field(default_factory=OrderComparison)
    """Whether, and where, the orders of indices part."""

    caveats: tuple[str, ...] = ()
    """What makes the two not comparable, one sentence each."""


def compare_runs(record: RunRecord, reference: RunRecord, name: str) -> Comparison:
    """Return the comparison of `record` with `reference`, which is called `name`."""
    return Comparison(
        reference=summarize_run(reference, name),
        settings=_settings(record, reference),
        orders=compare_digests(record, reference),
        caveats=tuple(_caveats(record, reference)),
    )


def _caveats(run: RunRecord, reference: RunRecord) -> list[str]:
    return [
        *_different_programs(run, reference),
        *_different_amounts(run, reference),
        *_different_hosts(run, reference),
        *_different_datasets(run, reference),
        *compare_digests(run, reference).parted,
    ]


def _different_programs(run: RunRecord, reference: RunRecord) -> list[str]:
    found = []
    if run.command != reference.command:
        found.append(f"different commands: {_command(run)} and {_command(reference)}")
    for record, name in ((run, "this run"), (reference, "the other run")):
        if record.exit_code or record.error:
            found.append(f"{name} ended early: {record.error or f'exit code {record.exit_code}'}")
    return found


def _different_amounts(run: RunRecord, reference: RunRecord) -> list[str]:
    amounts = {
        "samples": [sum(loader.statistics.samples for loader in record.loaders) for record in (run, reference)],
        "batches": [sum(loader.statistics.batches for loader in record.loaders) for record in (run, reference)],
    }
    return [
        f"different numbers of {what}: {count_text(one)} and {count_text(other)}"
        for what, (one, other) in amounts.items()
        if one != other
    ]


def _different_hosts(run: RunRecord, reference: RunRecord) -> list[str]:
    found = []
    if run.cpus != reference.cpus:
        found.append(f"different numbers of usable cores: {run.cpus} and {reference.cpus}")
    found += [f"different machines: {text}" for text in _differing_entries(run.machine, reference.machine)]
    found += [f"different versions: {text}" for text in _differing_entries(run.versions, reference.versions)]
    return found


def _different_datasets(run: RunRecord, reference: RunRecord) -> list[str]:
    ours, theirs = (
        sorted({loader.name.partition(" #")[0] for loader in record.loaders}) for record in (run, reference)
    )
    return [f"different datasets: {_few(ours)} and {_few(theirs)}"] if ours != theirs else []


def _differing_entries(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Return the entries that both mappings have and disagree on, as text."""
    return [
        f"{key.removesuffix('_nbytes')} {_value(key, one[key])} and {_value(key, other[key])}"
        for key in one
        if key in other and one[key] != other[key]
    ]


def _value(key: str, value: object) -> str:
    return size_text(value) if key.endswith("_nbytes") and isinstance(value, int) else str(value)


def _settings(run: RunRecord, reference: RunRecord) -> tuple[Difference, ...]:
    """Return the settings that differ between loaders of the same name; the first of a name stands for all."""
    found = []
    reference_loaders = _loaders_by_name(reference)
    for name, loader in _loaders_by_name(run).items():
        other = reference_loaders.get(name)
        if other is None:
            continue
        ours, theirs = _all_settings(loader), _all_settings(other)
        keys = [*ours, *(key for key in theirs if key not in ours)]
        found += [
            Difference(
                setting=f"{key} of {loader.label}", run=str(ours.get(key, "–")), reference=str(theirs.get(key, "–"))
            )
            for key in keys
            if ours.get(key) != theirs.get(key)
        ]
    return tuple(found)


def _loaders_by_name(record: RunRecord) -> dict[str, LoaderRecord]:
    """Return the loaders by name: between two runs, the lines that make them may have moved."""
    found: dict[str, LoaderRecord] = {}
    for loader in group_loaders(record.loaders):
        found.setdefault(_name_of(loader.label), loader)
    return found


def _name_of(label: str) -> str:
    """Return the name in the label of a loader, or of several that are alike.

    >>> _name_of("Images #2 and 3 more like it (train.py:12)")
    'Images #2'
    """
    return label.partition(" (")[0].partition(" and ")[0].partition(" on ")[0]


def _all_settings(loader: LoaderRecord) -> dict[str, object]:
    statistics = loader.statistics
    return {**loader.settings, "worker_type": statistics.worker_type, "start_method": statistics.start_method or "–"}


def _command(record: RunRecord) -> str:
    return " ".join(record.command) or "nothing"


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "") or "none"
