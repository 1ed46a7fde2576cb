"""Times a program's batches, whatever loader they come from: torch's own or penstock's."""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from penstock.observe.record.baseline import TimingWindow

WARMUP_BATCHES = 10
"""Batches that are not counted: the first ones wait for workers to start and caches to fill."""

MAX_BATCHES = 200
LONG_ENOUGH_S = 15.0
MIN_BATCHES = 6
"""The window ends after `MAX_BATCHES`, or after `LONG_ENOUGH_S` if there are `MIN_BATCHES` by then."""


class Stopwatch:
    """Reads the clock around every `__next__` and `__iter__` of loaders. Used by one thread.

    Args:
        max_batches: when it has timed this many batches, it restores the loaders' methods.
        long_enough_s: likewise after this time, if it has timed `MIN_BATCHES`.
        on_finished: called then, in the program's thread, before the program gets that batch.
    """

    def __init__(
        self,
        max_batches: int,
        long_enough_s: float = float("inf"),
        on_finished: Callable[[], None] | None = None,
    ) -> None:
        self._max_batches = max_batches
        self._long_enough_s = long_enough_s
        self._on_finished = on_finished
        self.batch_intervals_s: list[float] = []
        """Seconds from batch to batch, after the warm-up."""
        self.batch_loading_s: list[float] = []
        """Those of them in which the program waited for the batch, or for the loader's iterator."""
        self._samples: list[int | None] = []
        self._is_torchs: list[bool] = []
        self._batch_sizes: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        self._batches = 0
        self._pending_s = 0.0
        self._returned_at = 0.0
        self._originals: list[tuple[type, str, Any]] = []

    def install(self) -> None:
        """Wrap the loaders' methods. Called once torch is imported."""
        from torch.utils.data import dataloader

        loader = dataloader.DataLoader
        base = next(kind for kind in loader.__mro__ if kind.__module__ == dataloader.__name__)
        self._wrap(base, "__iter__", self._time_iter)
        self._wrap(dataloader._BaseDataLoaderIter, "__next__", self._time_next)
        if "penstock.loader.dataloader" in sys.modules:
            from penstock.loader.iterator import LoaderIterator

            self._wrap(LoaderIterator, "__next__", self._time_next)

    def remove(self) -> None:
        """Restore the loaders' methods."""
        while self._originals:
            kind, name, original = self._originals.pop()
            setattr(kind, name, original)

    def samples(self, batches: int) -> int | None:
        """Return the number of samples in the first `batches`; None if a loader's batch size is unknown."""
        sizes = self._samples[:batches]
        return sum(size for size in sizes if size is not None) if sizes and None not in sizes else None

    def from_torch(self, batches: int) -> int:
        """Return how many of the first `batches` came from an iterator that is not penstock's."""
        return sum(self._is_torchs[:batches])

    def window(self, batches: int) -> TimingWindow:
        """Return the timing of the first `batches`."""
        return TimingWindow.of(self.batch_intervals_s[:batches], self.batch_loading_s[:batches], self.samples(batches))

    def _wrap(self, kind: type, name: str, around: Callable[[Any, Any], Any]) -> None:
        original = getattr(kind, name)
        self._originals.append((kind, name, original))

        @functools.wraps(original)  # so that it is known what was there before
        def wrapped(this: Any) -> Any:
            return around(original, this)

        setattr(kind, name, wrapped)

    def _time_iter(self, original: Callable[[Any], Any], loader: Any) -> Any:
        began = time.perf_counter()
        iterator = original(loader)
        size = getattr(loader, "batch_size", None) or getattr(loader.batch_sampler, "batch_size", None)
        self._batch_sizes[iterator] = size
        self._pending_s += time.perf_counter() - began
        return iterator

    def _time_next(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        began = time.perf_counter()
        try:
            batch = original(iterator)
        except BaseException:
            self._pending_s += time.perf_counter() - began
            raise
        now = time.perf_counter()
        self._batches += 1
        if self._batches > WARMUP_BATCHES:
            self._is_torchs.append(not type(iterator).__module__.startswith("penstock."))
            self._add(now - self._returned_at, now - began + self._pending_s, self._batch_sizes.get(iterator))
        self._returned_at, self._pending_s = time.perf_counter(), 0.0
        return batch

    def _add(self, interval_s: float, loading_s: float, samples: int | None) -> None:
        self.batch_intervals_s.append(interval_s)
        self.batch_loading_s.append(loading_s)
        self._samples.append(samples)
        batches = len(self.batch_intervals_s)
        is_long_enough = batches >= MIN_BATCHES and sum(self.batch_intervals_s) >= self._long_enough_s
        if is_long_enough or batches >= self._max_batches:
            self.remove()
            if self._on_finished is not None:
                self._on_finished()
