"""Registers every DataLoader that a program creates, and keeps its counters after the loader is gone."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from penstock.core.events import Recorder
from penstock.core.stats import LoaderStatistics
from penstock.observe.record.perfetto_trace import LoaderEvents
from penstock.observe.record.run_record import LoaderRecord

if TYPE_CHECKING:  # importing it imports torch, and the program decides when
    from penstock.loader.dataloader import DataLoader
    from penstock.loader.loop_snapshot import LoopSnapshot

_SETTINGS = (
    "batch_size",
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory",
    "drop_last",
    "in_order",
)


class RegisteredLoader:
    """One loader and its counters. Holds no reference that would keep its dataset alive."""

    def __init__(self, loader: DataLoader[Any], name: str) -> None:
        from penstock.loader.dataloader import runtime_of
        from penstock.loader.loop_snapshot import take_snapshot

        self.name = name
        self.settings = {key: getattr(loader, key) for key in _SETTINGS if getattr(loader, key, None) is not None}
        self._take_snapshot = take_snapshot
        self._loader = weakref.ref(loader)
        self._counters = runtime_of(loader).counters
        self._last = loader.statistics()

    @property
    def is_finished(self) -> bool:
        """Whether its counters are final: the loader and its last loop are gone."""
        loop = self._counters.loop
        return self._loader() is None and (loop is None or loop() is None)

    def statistics(self) -> LoaderStatistics:
        """Return the loader's counters, or the last ones if it is gone."""
        loader = self._loader()
        if loader is not None:
            self._last = loader.statistics()
            return self._last
        last = self._last
        return self._counters.snapshot(
            ring=last.ring, worker_type=last.worker_type, start_method=last.start_method, workers=last.workers
        )

    def events(self) -> LoaderEvents:
        """Return the recorded events of its batches; none if recording is off."""
        recorder = self._counters.recorder
        if recorder is None:
            return LoaderEvents(name=self.name, events=())
        return LoaderEvents(name=self.name, events=recorder.events(), dropped=recorder.dropped)

    def loop_snapshot(self) -> LoopSnapshot | None:
        """Return the state of its loop; None if the loop changed while it was read."""
        return self._take_snapshot(self._counters)

    def record(self) -> LoaderRecord:
        """Return its settings and counters as run.json keeps them."""
        return LoaderRecord(name=self.name, settings=self.settings, statistics=self.statistics())


class LoaderRegistry:
    """The loaders of a program, in the order they were created.

    Args:
        record_events: whether loaders record what happens to each batch.
    """

    def __init__(self, *, record_events: bool = False) -> None:
        self.loaders: list[RegisteredLoader] = []
        self._record_events = record_events
        self._name_counts: dict[str, int] = {}

    def register(self, loader: DataLoader[Any]) -> None:
        """Add a new loader."""
        if self._record_events:
            from penstock.loader.dataloader import runtime_of

            runtime_of(loader).counters.recorder = Recorder()
        name = type(loader.dataset).__name__
        before = self._name_counts.get(name, 0)
        self._name_counts[name] = before + 1
        self.loaders.append(RegisteredLoader(loader, f"{name} #{before + 1}" if before else name))
