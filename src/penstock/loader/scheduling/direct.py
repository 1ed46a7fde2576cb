"""Loading in the training process as torch does it: fetch the samples, collate them, hand out the batch.

For loops that ask for nothing else: no error policy, no seed per sample, no pinning. What torch does for a batch takes
20 µs, so nothing is done here for each sample, and little for each batch.

A dataset that lies in memory is gathered, if that is proven to give the same batch (see `in_memory`). Large batches are
collated into reused slots where that saves the page faults of fresh memory, which is measured (see `slot_trial`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate

from penstock.loader.batch_writer import arena_needed
from penstock.loader.collate import fast_map, in_arena
from penstock.loader.in_memory import CannotGatherError, gather_of
from penstock.loader.sampling.batch_cursor import BatchCursor
from penstock.loader.sampling.stream_cursor import Consumed
from penstock.loader.scheduling.inline import InlineScheduler
from penstock.loader.scheduling.slot_trial import SlotTrial
from penstock.loader.transport.arena import Arena
from penstock.loader.workers.busy_time import BusyTime
from penstock.loader.workers.sample_fetcher import SampleFetcher, add_origin
from penstock.loader.workers.sample_seed import Making

_ATOMS = frozenset({int, float, bool, str, bytes})
_CONTAINERS = frozenset({list, tuple, dict})


class DirectScheduler(InlineScheduler):
    """Makes each batch when it is asked for; of a map-style dataset, or of one stream.

    Args:
        arguments: as of `InlineScheduler`, and so are `others`.
        trial: whether to use slots.
        busy_time: measures the batches of all passes.
    """

    def __init__(self, *arguments: Any, trial: SlotTrial, busy_time: BusyTime, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._trial = trial
        fetcher = self._shards.fetcher(0)
        self._samples = fetcher.samples if fetcher is not None else SampleFetcher(self._worker_spec)
        self._making = Making(self._samples)
        self._busy_time = busy_time
        self._count = 0
        self._nbytes = _BatchBytes()
        self._fetched_ns = 0
        spec = self._worker_spec
        self._samples.epoch_seed = self._epoch_seed
        self._fetching = spec.fetching
        self._getitems = self._fetching is None and getattr(spec.dataset, "__getitems__", None)
        self._is_default = spec.auto_collation and spec.collate_fn is default_collate
        self._fast_map = fast_map()
        self._collate = partial(collate, collate_fn_map=self._fast_map) if self._is_default else spec.collate_fn
        self._gather = gather_of(spec.dataset) if self._is_default and not spec.iterable else None
        self._draws_tensors = (
            self._gather is not None and isinstance(self._indices, BatchCursor) and self._indices.draw_tensors()
        )

    def next_batch(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: the epoch is over.
        """
        trial = self._trial
        if self._gather is not None or not self._is_default or not trial.is_wanted:
            return self._next_direct()
        began, samples = time.thread_time_ns(), self._counters.samples
        batch = super().next_batch() if trial.uses_slots and trial.by_rows else self._next_direct()
        trial.add((time.thread_time_ns() - began) / max(1, self._counters.samples - samples))
        return batch

    def _next_direct(self) -> Any:
        if not self._waiting:
            raise StopIteration
        indices = next(self._indices)
        self._number += 1
        self.consumed_since.append(Consumed(self._number))
        counters = self._counters
        self._busy_time.begin()
        began = self._fetched_ns = time.perf_counter_ns()
        try:
            batch = self._make_batch(indices)
        except _EndedError:
            self._waiting.clear()
            self.consumed_since[-1] = Consumed(self._number, has_ended=True)
            raise StopIteration from None
        ended, fetched = time.perf_counter_ns(), self._fetched_ns
        counters.inline_ns += ended - began
        counters.fetch_ns += fetched - began
        counters.collate_ns += ended - fetched
        counters.asleep_ns += max(0, ended - began - self._busy_time.end(ended - began))
        counters.batches += 1
        counters.samples += self._count
        counters.nbytes += self._nbytes.of(batch)
        self.consumed, self.consumed_since = self.consumed_since, []
        if counters.recorder is not None:
            counters.recorder.made = (began, fetched - began, ended - fetched, self._count)
        return batch

    def _make_batch(self, indices: Any) -> Any:
        if self._gather is not None:
            with contextlib.suppress(CannotGatherError):
                batch = self._gather(indices)
                self._count = len(indices)
                return batch
            if self._draws_tensors and type(indices) is torch.Tensor:
                indices = indices.tolist()
        return self._make_of_samples(indices)

    def _make_of_samples(self, indices: Any) -> Any:
        spec, samples = self._worker_spec, self._samples
        with self._making:
            if spec.iterable:
                found = self._next_of_stream(indices)
            elif not spec.auto_collation:
                found, self._count = samples.fetch_plain((indices,))[0], 1
            elif self._getitems:
                samples.begin_bulk(indices)
                try:
                    found = spec.dataset.__getitems__(indices)
                except Exception as error:
                    add_origin(error, f"one of the samples {indices!r} of the dataset")
                    raise
                self._count = len(found) if hasattr(found, "__len__") else 0
            else:
                known = indices if type(indices) is list else [*indices]
                if self._fetching is None:
                    found = samples.fetch_plain(known)
                else:
                    with self._fetching(known):
                        found = samples.fetch_plain(known)
                self._count = len(found)
            self._fetched_ns = time.perf_counter_ns()
            samples.begin_collate()
            if self._is_default and self._trial.is_wanted and type(found) is list and found:
                return self._collate_large(found)
            return self._collate(found)

    def _collate_large(self, samples: list[Any]) -> Any:
        """Collate samples of which nobody knows yet that they make a small batch; in a slot, if that is wanted."""
        needed, by_rows = arena_needed(samples[0], len(samples))
        self._trial.look(needed, by_rows=by_rows, epoch=self._counters.length)
        slot = self._ring.acquire_larger(needed) if needed and self._trial.uses_slots else None
        if slot is None:
            return self._collate(samples)
        arena = Arena(self._lend(slot))
        self._slot = None
        batch = collate(samples, collate_fn_map=in_arena(self._fast_map, arena))
        self._ring.note(slot, arena.used)
        return batch

    def _next_of_stream(self, indices: Any) -> Any:
        """Return the next samples of the stream; without automatic batching the next one, by itself."""
        spec, samples = self._worker_spec, self._samples
        wanted = len(indices) if spec.auto_collation else 1
        found = [] if samples.has_ended else samples.fetch_next_plain(wanted)
        if not found or (spec.drop_last and len(found) < wanted):
            raise _EndedError
        self._count = len(found)
        return found if spec.auto_collation else found[0]


class _EndedError(Exception):
    """The stream has no more samples, or too few for a batch."""


class _BatchBytes:
    """Returns the bytes of the tensors and arrays in batches, without looking through numbers and text.

    Of batches of many parts, ever fewer are looked at, at least one in `_LONGEST`; others count as the last of them.
    """

    _MANY = 16
    _LONGEST = 64

    def __init__(self) -> None:
        self._last = 0
        self._between = 0
        self._left = 0
        self._parts = 0

    def of(self, batch: Any) -> int:
        """Return the bytes of a batch."""
        if self._left:
            self._left -= 1
            return self._last
        self._parts = 0
        self._last = self._look(batch, 4)
        if self._parts > self._MANY:
            self._left = self._between = min(2 * self._between + 1, self._LONGEST)
        return self._last

    def _look(self, batch: Any, depth: int) -> int:
        self._parts += 1
        kind = type(batch)  # first: isinstance takes a microsecond for tensors
        if kind is torch.Tensor or (kind not in _CONTAINERS and isinstance(batch, torch.Tensor)):
            return batch.nbytes if batch.layout is torch.strided else 0
        if isinstance(batch, np.ndarray):
            return batch.nbytes
        if kind not in (list, tuple):
            if isinstance(batch, Mapping):
                batch = list(batch.values())
            elif not isinstance(batch, list | tuple):
                return 0
        if not batch or not depth or (type(batch[0]) in _ATOMS and type(batch[-1]) in _ATOMS):
            return 0
        return sum([self._look(part, depth - 1) for part in batch])
