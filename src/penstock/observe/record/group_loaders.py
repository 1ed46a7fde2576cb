"""Groups loaders that are alike: a script that creates its loader again for every epoch reports it once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from penstock.observe.record import rates
from penstock.observe.record.run_record import LoaderRecord, label_of


def group_loaders(loaders: Iterable[LoaderRecord]) -> list[LoaderRecord]:
    """Return the loaders that handed out a batch. Those made in one line, with equal length and settings, are one."""
    return _group(loader for loader in loaders if loader.statistics.batches)


def group_uncounted(loaders: Iterable[LoaderRecord]) -> list[LoaderRecord]:
    """Return the loaders whose own iterator handed out its batches uncounted, grouped likewise."""
    return _group(
        loader
        for loader in loaders
        if loader.is_iterated and loader.iterator == "own" and not loader.statistics.batches
    )


def iterator_text(loader: LoaderRecord) -> str:
    """Return what iterated `loader`.

    >>> from penstock.core.stats import LoaderStatistics
    >>> loader = LoaderRecord(name="A", settings={}, statistics=LoaderStatistics())
    >>> iterator_text(loader), iterator_text(replace(loader, iterator="own", loader_class="Cached"))
    ('replaced', 'own iterator of Cached, left alone')
    """
    match loader.iterator:
        case "subclass":
            return f"subclass {loader.loader_class} on penstock's iterator"
        case "own":
            return f"own iterator of {loader.loader_class}, left alone"
        case "fallback":
            return f"fell back to torch's, because {loader.fallback_reason}"
        case _:
            return "replaced"


def _group(loaders: Iterable[LoaderRecord]) -> list[LoaderRecord]:
    groups: dict[str, list[LoaderRecord]] = {}
    for loader in loaders:
        made = label_of(loader.name.partition(" #")[0], loader.made_at)
        counted = loader.statistics  # of loaders with and without workers, waiting is not the same sum
        key = f"{made}: {counted.length}, {counted.worker_type}, {settings_text(loader)}, {iterator_text(loader)}"
        groups.setdefault(key, []).append(loader)
    return [_combine(group) if len(group) > 1 else group[0] for group in groups.values()]


def settings_text(loader: LoaderRecord) -> str:
    """Return the settings of `loader` as arguments of a DataLoader."""
    statistics = loader.statistics
    start = f", {statistics.start_method}" if statistics.start_method else ""
    settings = [f"{name}={value!r}" for name, value in loader.settings.items()]
    if loader.is_watched:  # what its workers are is its own matter
        return ", ".join(settings)
    return ", ".join([*settings, f"worker_type={statistics.worker_type}{start}"])


def _combine(loaders: list[LoaderRecord]) -> LoaderRecord:
    ranks = len({loader.rank for loader in loaders})
    alike = len(loaders) // ranks
    name = loaders[0].name + (f" and {alike - 1} more like it" if alike > 1 else "")
    name += f" on {ranks} ranks" if ranks > 1 else ""
    return replace(
        loaders[0], name=name, statistics=rates.combine_statistics([loader.statistics for loader in loaders])
    )
