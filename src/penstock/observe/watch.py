"""Watching a program's loaders from outside: every DataLoader that was made, also after it is gone."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from penstock.core.events import Recorder
from penstock.core.stats import LoaderStatistics
from penstock.observe.record import LoaderRecord
from penstock.observe.trace import LoaderEvents

if TYPE_CHECKING:  # importing it would import torch, and that is for the program to do
    from penstock.feed.loader import DataLoader
    from penstock.feed.sight import LoopSight

_SETTINGS = (
    "batch_size",
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory",
    "drop_last",
    "in_order",
)


class WatchedLoader:
    """One loader and what it counted. Holds no reference that would keep its dataset alive."""

    def __init__(self, loader: DataLoader[Any], name: str) -> None:
        from penstock.feed.sight import look

        self.name = name
        self.settings = {key: getattr(loader, key) for key in _SETTINGS if getattr(loader, key, None) is not None}
        self._look = look
        self._loader = weakref.ref(loader)
        self._counters = loader._counters
        self._last = loader.statistics()

    @property
    def is_over(self) -> bool:
        """Whether nothing will be counted any more: the loader is gone, and its last loop too."""
        loop = self._counters.loop
        return self._loader() is None and (loop is None or loop() is None)

    def statistics(self) -> LoaderStatistics:
        """Return what the loader has counted so far, or had when it died."""
        loader = self._loader()
        if loader is not None:
            self._last = loader.statistics()
            return self._last
        last = self._last
        return self._counters.snapshot(
            ring=last.ring, body=last.body, start_method=last.start_method, workers=last.workers
        )

    def trace(self) -> LoaderEvents:
        """Return what happened to its batches, as far as that was recorded."""
        recorder = self._counters.recorder
        if recorder is None:
            return LoaderEvents(name=self.name, events=())
        return LoaderEvents(name=self.name, events=recorder.events(), dropped=recorder.dropped)

    def sight(self) -> LoopSight | None:
        """Return how its loop looks just now; None when that could not be told this time."""
        return self._look(self._counters)

    def record(self) -> LoaderRecord:
        """Return what is kept of it."""
        return LoaderRecord(name=self.name, settings=self.settings, statistics=self.statistics())


class Watch:
    """Collects the loaders that it is told of.

    Args:
        traced: whether they are to record what happens to each batch.
    """

    def __init__(self, *, traced: bool = False) -> None:
        self.loaders: list[WatchedLoader] = []
        self._traced = traced
        self._named: dict[str, int] = {}

    def notice(self, loader: DataLoader[Any]) -> None:
        """Watch `loader` from now on."""
        if self._traced:
            loader._counters.recorder = Recorder()
        name = type(loader.dataset).__name__
        before = self._named.get(name, 0)
        self._named[name] = before + 1
        self.loaders.append(WatchedLoader(loader, f"{name} #{before + 1}" if before else name))
