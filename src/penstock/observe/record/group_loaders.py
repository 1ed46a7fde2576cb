"""Groups loaders that are alike: a script that creates its loader again for every epoch reports it once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from penstock.observe.record import rates
from penstock.observe.record.run_record import LoaderRecord


def group_loaders(loaders: Iterable[LoaderRecord]) -> list[LoaderRecord]:
    """Return the loaders that handed out a batch, those with equal dataset, length and settings as one."""
    groups: dict[str, list[LoaderRecord]] = {}
    for loader in loaders:
        if loader.statistics.batches:
            dataset = loader.name.partition(" #")[0]
            groups.setdefault(f"{dataset}: {loader.statistics.length}, {settings_text(loader)}", []).append(loader)
    return [_combine(group) if len(group) > 1 else group[0] for group in groups.values()]


def settings_text(loader: LoaderRecord) -> str:
    """Return the settings of `loader` as arguments of a DataLoader."""
    statistics = loader.statistics
    start = f", {statistics.start_method}" if statistics.start_method else ""
    settings = [f"{name}={value}" for name, value in loader.settings.items()]
    return ", ".join([*settings, f"worker_type={statistics.worker_type}{start}"])


def _combine(loaders: list[LoaderRecord]) -> LoaderRecord:
    name = f"{loaders[0].name} and {len(loaders) - 1} more like it"
    return replace(
        loaders[0], name=name, statistics=rates.combine_statistics([loader.statistics for loader in loaders])
    )
