"""Indices → samples → a batch in an arena. The same code runs in worker processes, threads, Ray actors and inline.

A dataset's `__getitems__` is called once per batch where there is one, as torch's fetcher does, and the collate
function once per batch. One of our own sources fetches the files of a batch side by side; its samples are then made one
by one, each with its own seed and error. A collate function that has a method `collate_into(samples, arena)` is given
the arena, and writes the batch there itself (see `PadCollate`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import default_collate

from penstock.core.random_states import keep_states
from penstock.loader.batch_writer import BatchWriter, arena_needed
from penstock.loader.collate import collate_samples
from penstock.loader.transport.arena import Arena, ArenaFullError
from penstock.loader.workers.batch_task import Result
from penstock.loader.workers.busy_time import BusyTime
from penstock.loader.workers.sample_fetcher import SampleFetcher, Tick, add_origin
from penstock.loader.workers.sample_seed import Making
from penstock.loader.workers.worker_spec import WorkerSpec

_QUICK_NS = 100_000
"""A sample that takes less is quick: to ask before each of a batch whether to go on would take a good part of that."""

Enlarge = Callable[[int], Arena]
"""Called with the bytes that a batch needs, when its arena is too small; returns one of that size."""


class BatchFetcher:
    """Makes the batches of one task after another, from one dataset."""

    def __init__(self, worker_spec: WorkerSpec, *, in_training_process: bool = False) -> None:
        self.worker_spec = self._worker_spec = worker_spec
        self.samples = self._samples = SampleFetcher(worker_spec)
        self._keeps_states = in_training_process and worker_spec.seeded
        self._busy_time = BusyTime(with_process=not in_training_process)
        self._by_rows = worker_spec.auto_collation and worker_spec.collate_fn is default_collate
        self._fetching = worker_spec.fetching or contextlib.nullcontext
        self._collate_into = getattr(worker_spec.collate_fn, "collate_into", None)

    def pass_over(self, count: int, epoch_seed: int | None) -> None:
        """Make a batch of the iterable dataset and drop it; what fails in it has failed before, too."""
        self._samples.epoch_seed = epoch_seed
        with contextlib.suppress(Exception), self._keep_states(), Making(self._samples):
            self._samples.fetch_next(count, Result(), None)

    def _keep_states(self) -> contextlib.AbstractContextManager[None]:
        return keep_states() if self._keeps_states else contextlib.nullcontext()

    def make(
        self,
        indices: Any,
        arena: Arena | None,
        *,
        result: Result | None = None,
        epoch_seed: int | None = None,
        tick: Tick | None = None,
        enlarge: Enlarge | None = None,
        prefetched: contextlib.AbstractContextManager[Any] | None = None,
    ) -> Result:
        """Make the batch of `indices`, in `arena` where that pays; return `result` with what has become of it.

        When the arena is too small, `enlarge` is asked for a larger one; `Result.arena` is where the batch is.
        `prefetched` is entered while the samples are made.
        """
        self._samples.epoch_seed = epoch_seed
        result = result or Result()
        result.arena = arena
        with self._keep_states(), Making(self._samples):
            self._make(indices, result, tick, enlarge, prefetched)
        return result

    def _make(
        self,
        indices: Any,
        fetched: Result,
        tick: Tick | None,
        enlarge: Enlarge | None,
        prefetched: contextlib.AbstractContextManager[Any] | None,
    ) -> None:
        began = fetched.began_ns = time.perf_counter_ns()
        self._busy_time.begin()
        if not self._worker_spec.auto_collation:
            self._make_unbatched(indices, fetched, tick)
        elif self._worker_spec.iterable:
            self._make_by_samples(indices, fetched, tick, enlarge)
        elif self._worker_spec.makes_whole_batches:
            self._make_bulk(indices, fetched, tick, enlarge)
        elif (
            sequence := indices if isinstance(indices, list) else list(indices)
        ):  # arrays, sets, whatever can be iterated
            with prefetched or self._fetching(sequence):
                self._make_by_samples(sequence, fetched, tick, enlarge)
        else:
            fetched.batch = self._worker_spec.collate_fn([])
        passed_ns = time.perf_counter_ns() - began
        fetched.collate_ns = passed_ns - fetched.fetch_ns
        fetched.busy_ns = self._busy_time.end(passed_ns)

    # ── without automatic batching: one sample, or whatever the dataset makes of the index ──────────────────

    def _make_unbatched(self, index: Any, fetched: Result, tick: Tick | None) -> None:
        if tick is not None:
            tick(0)
        began = time.perf_counter_ns()
        if self._worker_spec.iterable:
            samples = self._samples.fetch_next(1, fetched, tick)
        else:
            samples = self._samples.fetch([index], fetched, None)
        fetched.fetch_ns = time.perf_counter_ns() - began
        if fetched.ended:
            return
        if not samples:
            fetched.empty = True
            return
        fetched.samples = 1
        fetched.batch = self._worker_spec.collate_fn(samples[0])

    # ── a whole batch in one call of the dataset ────────────────────────────────────────────────────────────

    def _make_bulk(self, indices: Any, fetched: Result, tick: Tick | None, enlarge: Enlarge | None) -> None:
        if tick is not None:
            tick(0)
        began = time.perf_counter_ns()
        self._samples.begin_bulk(indices)
        try:
            samples = self._worker_spec.dataset.__getitems__(indices)
        except Exception as error:
            if self._worker_spec.errors == "raise":
                add_origin(error, f"one of the samples {indices!r} of the dataset")
                raise
            samples = self._samples.fetch([*indices], fetched, tick)
        fetched.fetch_ns = time.perf_counter_ns() - began
        self._collate(samples, fetched, 0, enlarge)

    # ── sample by sample ────────────────────────────────────────────────────────────────────────────────────

    def _make_by_samples(
        self,
        indices: Sequence[Any],
        fetched: Result,
        tick: Tick | None,
        enlarge: Enlarge | None,
    ) -> None:
        head = self._timed_fetch(indices[:1], 0, fetched, tick)
        fetched.samples = len(head)
        if fetched.ended:
            return
        writer = self._open_writer(head, len(indices), fetched, enlarge)
        if writer is None:
            rest = self._timed_fetch(indices[1:], 1, fetched, tick, are_quick=fetched.fetch_ns < _QUICK_NS)
            self._finish_list([*head, *rest], len(indices), fetched, enlarge)
            return
        writer.add(head[0])
        for row in range(1, len(indices)):
            sample = self._timed_fetch(indices[row : row + 1], row, fetched, tick)
            if sample:
                writer.add(sample[0])
                fetched.samples += 1
            elif self._samples.has_ended:
                break
        self._finish_rows(writer, len(indices), fetched)

    def _open_writer(
        self,
        head: list[Any],
        count: int,
        fetched: Result,
        enlarge: Enlarge | None,
    ) -> BatchWriter | None:
        """Enlarge the arena for the batch that begins with `head`; return a writer where writing row by row pays."""
        if not (self._by_rows and head and fetched.arena is not None):
            return None
        needed, by_rows = arena_needed(head[0], count)
        if not needed:
            return None
        if needed > fetched.arena.nbytes:
            if enlarge is None:
                return None
            fetched.arena = enlarge(needed)
        return BatchWriter(head[0], count, fetched.arena) if by_rows else None

    def _timed_fetch(
        self, indices: Sequence[Any], row: int, fetched: Result, tick: Tick | None, *, are_quick: bool = False
    ) -> list[Any]:
        began = time.perf_counter_ns()
        if self._worker_spec.iterable:
            samples = self._samples.fetch_next(len(indices), fetched, tick, are_quick=are_quick)
        else:
            samples = self._samples.fetch(indices, fetched, tick, row, are_quick=are_quick)
        fetched.fetch_ns += time.perf_counter_ns() - began
        return samples

    def _finish_rows(self, writer: BatchWriter, wanted: int, fetched: Result) -> None:
        if self._is_dropped(fetched.samples, wanted):
            fetched.ended = True
        else:
            fetched.batch = writer.finish()

    def _finish_list(self, samples: list[Any], wanted: int, fetched: Result, enlarge: Enlarge | None) -> None:
        if self._is_dropped(len(samples), wanted):
            fetched.ended = True
        else:
            self._collate(samples, fetched, wanted, enlarge)

    def _is_dropped(self, got: int, wanted: int) -> bool:
        spec = self._worker_spec
        return spec.iterable and spec.drop_last and self._samples.has_ended and got < wanted

    def _collate(self, samples: Any, fetched: Result, wanted: int, enlarge: Enlarge | None) -> None:
        fetched.samples = len(samples) if hasattr(samples, "__len__") else 0
        if fetched.skipped and not fetched.samples:
            fetched.empty = True
            return
        self._samples.begin_collate()
        if self._by_rows:
            fetched.batch = collate_samples(samples, fetched.arena)
        elif self._collate_into is not None and fetched.arena is not None and enlarge is not None:
            try:
                fetched.batch = self._collate_into(samples, fetched.arena)
            except ArenaFullError as error:
                fetched.arena = enlarge(error.needed)
                fetched.batch = self._collate_into(samples, fetched.arena)
        else:
            fetched.batch = self._worker_spec.collate_fn(samples)
