"""Loaders that are alike: a script that makes its loader anew for every epoch has one of them in a person's mind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from penstock.observe import rates
from penstock.observe.record import LoaderRecord


def merged(loaders: Iterable[LoaderRecord]) -> list[LoaderRecord]:
    """Return those that handed out a batch, alike ones (same dataset, length and settings) as one."""
    alike: dict[str, list[LoaderRecord]] = {}
    for loader in loaders:
        if loader.statistics.batches:
            dataset = loader.name.partition(" #")[0]
            alike.setdefault(f"{dataset}: {loader.statistics.length}, {settings_text(loader)}", []).append(loader)
    return [_as_one(group) if len(group) > 1 else group[0] for group in alike.values()]


def settings_text(loader: LoaderRecord) -> str:
    """Return the settings of `loader` as a person would write them."""
    statistics = loader.statistics
    how = f", {statistics.start_method}" if statistics.start_method else ""
    words = [f"{name}={value}" for name, value in loader.settings.items()]
    return ", ".join([*words, f"body={statistics.body}{how}"])


def _as_one(loaders: list[LoaderRecord]) -> LoaderRecord:
    name = f"{loaders[0].name} and {len(loaders) - 1} more like it"
    return replace(loaders[0], name=name, statistics=rates.together([loader.statistics for loader in loaders]))
