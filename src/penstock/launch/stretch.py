"""Times a stretch of a program's batches, whatever loader they come from: torch's own or penstock's.

As a module (`python -m penstock.launch.stretch FILE COMMAND ...`) it runs a program with torch's own DataLoader, and
ends it in the middle, by `os._exit`, when the stretch is over: FILE then holds {"laps_s", "loading_s", "samples"}.
"""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.launch.program import program_of
from penstock.launch.substitute import after_torch
from penstock.observe.baseline import Stretch

WARM_UP = 10
"""Batches that do not count: the first ones wait for workers to start and caches to fill."""

MOST_BATCHES = 200
LONG_ENOUGH_S = 15.0
LEAST_BATCHES = 16
"""The stretch ends after `MOST_BATCHES`, or with the first batch after so many seconds, if it has so many."""


class Stopwatch:
    """Reads the clock around every `__next__` and `__iter__` of loaders. To be used by one thread.

    Args:
        most: batches after which it is enough; for all that matters the wrapping is then undone.
        long_enough_s: seconds after which it is enough, if there are `LEAST_BATCHES`.
        then: called when it is enough, in the program's thread, before it gets that batch.
    """

    def __init__(self, most: int, long_enough_s: float = float("inf"), then: Callable[[], None] | None = None) -> None:
        self._most = most
        self._long_enough_s = long_enough_s
        self._then = then
        self.laps_s: list[float] = []
        self.loading_s: list[float] = []
        self._samples: list[int | None] = []
        self._sizes: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        self._seen = 0
        self._pending_s = 0.0
        self._returned_at = 0.0
        self._undo: list[tuple[type, str, Any]] = []

    def install(self) -> None:
        """Begin, once torch is imported."""
        from torch.utils.data import dataloader

        loader = dataloader.DataLoader
        base = next(kind for kind in loader.__mro__ if kind.__module__ == dataloader.__name__)
        self._wrap(base, "__iter__", self._iter)
        self._wrap(dataloader._BaseDataLoaderIter, "__next__", self._next)
        if "penstock.feed.loader" in sys.modules:
            from penstock.feed.iteration import LoaderIterator

            self._wrap(LoaderIterator, "__next__", self._next)

    def remove(self) -> None:
        """Put everything back."""
        while self._undo:
            kind, name, original = self._undo.pop()
            setattr(kind, name, original)

    def samples(self, batches: int) -> int | None:
        """Return how many samples were in the first `batches` of the stretch; None if a loader could not tell."""
        sizes = self._samples[:batches]
        return sum(size for size in sizes if size is not None) if sizes and None not in sizes else None

    def _wrap(self, kind: type, name: str, around: Callable[[Any, Any], Any]) -> None:
        original = getattr(kind, name)
        self._undo.append((kind, name, original))

        def wrapped(this: Any) -> Any:
            return around(original, this)

        setattr(kind, name, wrapped)

    def _iter(self, original: Callable[[Any], Any], loader: Any) -> Any:
        began = time.perf_counter()
        iterator = original(loader)
        self._sizes[iterator] = getattr(loader, "batch_size", None) or getattr(loader.batch_sampler, "batch_size", None)
        self._pending_s += time.perf_counter() - began
        return iterator

    def _next(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        began = time.perf_counter()
        try:
            batch = original(iterator)
        except BaseException:
            self._pending_s += time.perf_counter() - began
            raise
        now = time.perf_counter()
        self._seen += 1
        if self._seen > WARM_UP:
            self.laps_s.append(now - self._returned_at)
            self.loading_s.append(now - began + self._pending_s)
            self._samples.append(self._sizes.get(iterator))
            is_long = len(self.laps_s) >= LEAST_BATCHES and sum(self.laps_s) >= self._long_enough_s
            if is_long or len(self.laps_s) >= self._most:
                self.remove()
                if self._then is not None:
                    self._then()
        self._returned_at, self._pending_s = time.perf_counter(), 0.0
        return batch


def stretch_of(found: Stopwatch, batches: int) -> Stretch:
    """Return the first `batches` that a stopwatch timed."""
    return Stretch.of(found.laps_s[:batches], found.loading_s[:batches], found.samples(batches))


def main(argv: Sequence[str]) -> None:
    """Run `argv[1:]` with torch's own loader until the stretch is over, and write it to `argv[0]`."""
    file, command = Path(argv[0]), argv[1:]

    def write() -> None:
        batches = len(watch.laps_s)
        found = {"laps_s": watch.laps_s, "loading_s": watch.loading_s, "samples": watch.samples(batches)}
        file.write_text(json.dumps(found), encoding="utf-8")

    def stop() -> None:
        write()
        os._exit(0)  # the program's own clean-up would run for a program that has not come to its end

    watch = Stopwatch(MOST_BATCHES, LONG_ENOUGH_S, stop)
    program = program_of(command)
    after_torch(watch.install)
    try:
        program()
    finally:
        write()


if __name__ == "__main__":
    main(sys.argv[1:])
