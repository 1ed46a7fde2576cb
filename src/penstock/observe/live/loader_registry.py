"""Registers every DataLoader that a program makes, and keeps its counters after the loader is gone."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter
from types import FrameType
from typing import TYPE_CHECKING, Any

from penstock.core.events import LoaderEvents, Recorder
from penstock.core.package_folder import PACKAGE_FOLDER
from penstock.core.stats import LoaderStatistics, RingCounts
from penstock.core.user_code import is_users
from penstock.observe.record.run_record import IteratorKind, LoaderRecord, label_of

if TYPE_CHECKING:  # importing it imports torch, and the program decides when
    from penstock.loader.counters import Counters
    from penstock.observe.live.loop_snapshot import LoopSnapshot

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

    def __init__(self, loader: Any) -> None:
        from penstock.loader.counters import Counters
        from penstock.loader.dataloader import find_runtime
        from penstock.observe.live.loop_snapshot import take_snapshot

        self.dataset = type(loader.dataset if hasattr(loader, "dataset") else loader.root).__name__
        """Its class; of torchdata's loader of nodes that of the last node."""
        self.number = 0
        """Which of the iterated loaders with a dataset of this class it is; 0 before it is iterated."""
        self.made_at = _made_at(loader)
        self.settings = {key: getattr(loader, key) for key in _SETTINGS if getattr(loader, key, None) is not None}
        self._shuffled_by = _random_sampler(loader)
        self._class = type(loader)
        self._take_snapshot = take_snapshot
        self._loader = weakref.ref(loader)
        runtime = find_runtime(loader)
        self._has_runtime = runtime is not None
        self._is_auto = runtime is not None and runtime.config.is_auto
        self._counters = runtime.counters if runtime is not None else Counters()
        self._generator_counters = Counters()
        """Of a generator that `__iter__` returns; what it iterates may have counted the same batches already."""
        self._torch_iterator: weakref.ref[Any] | None = None
        self._last = runtime.statistics() if runtime is not None else self._own_statistics()

    def is_of(self, loader: Any) -> bool:
        """Whether this is `loader`."""
        return self._loader() is loader

    def counters_for(self, iterator: Any) -> Counters:
        """Return the counters for an iterator that is not penstock's; see `TorchWatch`."""
        if self.is_of(iterator):
            return self._generator_counters
        self._torch_iterator = weakref.ref(iterator)
        return self._counters

    def record_events(self) -> None:
        """Record what happens to each batch from now on."""
        self._counters.recorder = Recorder()
        self._generator_counters.recorder = Recorder()

    @property
    def name(self) -> str:
        """The class of its dataset, and its number where there are several."""
        return f"{self.dataset} #{self.number}" if self.number > 1 else self.dataset

    @property
    def label(self) -> str:
        """Its name, and where it was made, as in "ImageFolder #2 (train.py:12)"."""
        return label_of(self.name, self.made_at)

    @property
    def begun_ns(self) -> int:
        """When it was first iterated; 0 if it was not."""
        return self._used_counters().begun_ns

    @property
    def is_finished(self) -> bool:
        """Whether its counters are final: the loader and its last loop are gone."""
        loops = (self._counters.loop, self._torch_iterator)
        return self._loader() is None and all(loop is None or loop() is None for loop in loops)

    @property
    def iterator_kind(self) -> IteratorKind:
        """What iterates it."""
        if self._counters.fallback_reason:
            return "fallback"
        is_penstocks = self._class.__module__.startswith("penstock.")
        if self._counters.loop is not None or is_penstocks:
            return "replaced" if is_penstocks else "subclass"
        from torch.utils.data.dataloader import DataLoader

        has_own = self._class.__iter__ is not DataLoader.__iter__ or not self._has_runtime
        return "own" if has_own or self._torch_iterator is not None else "subclass"

    def statistics(self, *, digests: bool = True) -> LoaderStatistics:
        """Return the loader's counters, or the last ones if it is gone; `digests` as in `Counters.snapshot`."""
        from penstock.loader.dataloader import find_runtime

        loader, counters = self._loader(), self._used_counters()
        runtime = find_runtime(loader)
        if counters is self._generator_counters:
            self._last = self._own_statistics()
        elif runtime is not None:
            self._last = runtime.statistics(digests=digests)
        else:
            last = self._last
            self._last = counters.snapshot(
                ring=last.ring,
                worker_type=last.worker_type,
                start_method=last.start_method,
                workers=last.workers,
                digests=digests,
            )
        return self._last

    def events(self) -> LoaderEvents:
        """Return the recorded events of its batches; none if recording is off."""
        recorder = self._used_counters().recorder
        if recorder is None:
            return LoaderEvents(name=self.label, events=())
        return LoaderEvents(name=self.label, events=recorder.events(), dropped=recorder.dropped)

    def loop_snapshot(self) -> LoopSnapshot | None:
        """Return the state of its loop; None if the loop changed while it was read."""
        return self._take_snapshot(self._counters)

    def record(self) -> LoaderRecord:
        """Return its settings and counters as run.json keeps them."""
        return LoaderRecord(
            name=self.name,
            made_at=self.made_at,
            loader_class=self._class.__name__,
            iterator=self.iterator_kind,
            fallback_reason=self._counters.fallback_reason,
            is_iterated=bool(self.begun_ns),
            shuffled_by=self._shuffled_by,
            settings={**self.settings, "num_workers": "auto"} if self._is_auto else self.settings,
            statistics=self.statistics(),
        )

    def _used_counters(self) -> Counters:
        is_generator_alone = self._generator_counters.begun_ns and not self._counters.begun_ns
        return self._generator_counters if is_generator_alone else self._counters

    def _own_statistics(self) -> LoaderStatistics:
        workers = self.settings.get("num_workers", 0)
        return self._used_counters().snapshot(
            ring=RingCounts(), worker_type="process" if workers else "inline", start_method="", workers=workers
        )


class LoaderRegistry:
    """The loaders of a program, in the order they were made.

    Args:
        record_events: whether loaders record what happens to each batch.
    """

    def __init__(self, *, record_events: bool = False) -> None:
        self.loaders: list[RegisteredLoader] = []
        self._record_events = record_events
        self._by_id: dict[int, RegisteredLoader] = {}
        self._lock = threading.Lock()
        self._seen = 0
        self._not_iterated: list[RegisteredLoader] = []
        self._numbers: Counter[str] = Counter()

    def find(self, loader: Any) -> RegisteredLoader | None:
        """Return the entry of a loader that is registered."""
        found = self._by_id.get(id(loader))
        return found if found is not None and found.is_of(loader) else None

    def find_counters(self, loader: Any, iterator: Any) -> Counters:
        """Return the counters for an iterator that is not penstock's; see `RegisteredLoader.counters_for`."""
        return (self.find(loader) or self.register(loader)).counters_for(iterator)

    def register(self, loader: Any) -> RegisteredLoader:
        """Add a new loader."""
        registered = RegisteredLoader(loader)
        if self._record_events:
            registered.record_events()
        self._by_id[id(loader)] = registered
        self.loaders.append(registered)
        return registered

    def iterated(self) -> list[RegisteredLoader]:
        """Return the loaders that have been iterated. The others take no number."""
        with self._lock:
            loaders = list(self.loaders)
            waiting, self._seen = [*self._not_iterated, *loaders[self._seen :]], len(loaders)
            begun = sorted((one.begun_ns, number, one) for number, one in enumerate(waiting) if one.begun_ns)
            self._not_iterated = [one for one in waiting if not (one.begun_ns or one.is_finished)]
            for _, _, loader in begun:
                self._numbers[loader.dataset] += 1
                loader.number = self._numbers[loader.dataset]
        return [loader for loader in loaders if loader.number]

    def records(self) -> tuple[LoaderRecord, ...]:
        """Return the records of all loaders."""
        self.iterated()
        return tuple(loader.record() for loader in list(self.loaders))


def _made_at(loader: Any) -> str:
    """Return file and line of the call that makes `loader`: in the program, or else in the library that makes it."""
    frame: FrameType | None = sys._getframe(1)
    nearest = ""
    while frame is not None:
        code = frame.f_code
        is_constructor = code.co_name == "__init__" and frame.f_locals.get(code.co_varnames[0]) is loader
        if not code.co_filename.startswith(PACKAGE_FOLDER) and not is_constructor:
            where = f"{_file_name(code.co_filename)}:{frame.f_lineno}"
            if is_users(code.co_filename):
                return where
            nearest = nearest or where
        frame = frame.f_back
    return nearest


def _file_name(path: str) -> str:
    """Return the last part of a path; of a notebook's cell its name, as in "In[3]"."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    cell = shell.compile.format_code_name(path) if shell is not None else None
    return str(cell[1]) if cell else os.path.basename(path)


def _random_sampler(loader: Any) -> str:
    """Return the class of the loader's sampler if that draws a random order."""
    sampler = getattr(loader, "sampler", None)
    is_random = type(sampler).__name__ == "RandomSampler" or getattr(sampler, "shuffle", False) is True
    return type(sampler).__name__ if is_random else ""
