"""Loading in the training process as torch does it: fetch the samples, collate them, hand out the batch.

For loops that ask for nothing else: no error policy, no seed per sample, no pinning. What torch does for a batch takes
20 µs, so nothing is done here for each sample, and little for each batch.

A dataset that lies in memory is gathered, if that is proven to give the same batch (see `in_memory`). Where batches are
large, collating them into reused slots may save the page faults of fresh memory. Whether it does depends on the C heap,
so both ways are measured in the loop's first large batches (`SlotTrial`).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate

from penstock.loader.batch_writer import array_nbytes
from penstock.loader.collate import fast_map
from penstock.loader.in_memory import CannotGatherError, gather_of
from penstock.loader.sampling.batch_cursor import BatchCursor
from penstock.loader.sampling.stream_cursor import Consumed
from penstock.loader.scheduling.inline import InlineScheduler
from penstock.loader.workers.sample_fetcher import SampleFetcher, add_origin
from penstock.loader.workers.sample_seed import Making

_ATOMS = frozenset({int, float, bool, str, bytes})

_LARGE_NBYTES = 1 << 20
"""Of a batch. Smaller ones fit into what the heap keeps, and a slot costs more than it saves."""

_WARM_UP = 3
_PAIRS = 4
_WORTH = 0.9
"""Slots must take at most this share of the time."""


class SlotTrial:
    """Measures whether large batches are made faster in reused slots, or in fresh memory as torch makes them.

    Its batches take turns. The first ones in slots are not counted: their pages are new.
    """

    def __init__(self) -> None:
        self.uses_slots = False
        """Where the next batch is to be made."""
        self._is_large: bool | None = None
        self._batches = 0
        self._ns: dict[bool, list[float]] = {True: [], False: []}

    def look(self, nbytes: int) -> None:
        """Begin, if the loop's first batch is large."""
        if self._is_large is None:
            self._is_large = self.uses_slots = nbytes >= _LARGE_NBYTES

    @property
    def is_undecided(self) -> bool:
        """Whether the next batch has to be measured, or looked at."""
        return self._is_large is None or (self._is_large and len(self._ns[False]) < _PAIRS)

    def add(self, ns_per_sample: float) -> None:
        """Record a batch that was made as `uses_slots` says."""
        if not self._is_large:
            return
        self._batches += 1
        if self._batches <= _WARM_UP:
            return
        self._ns[self.uses_slots].append(ns_per_sample)
        self.uses_slots = not self.uses_slots
        if not self.is_undecided:
            in_slots, fresh = (statistics.median(self._ns[where]) for where in (True, False))
            self.uses_slots = in_slots <= _WORTH * fresh


class DirectScheduler(InlineScheduler):
    """Makes each batch when it is asked for; of a map-style dataset, or of one stream.

    Args:
        arguments: as of `InlineScheduler`, and so are `others`.
        trial: whether to use slots, as far as earlier epochs have shown.
    """

    def __init__(self, *arguments: Any, trial: SlotTrial, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._trial = trial
        fetcher = self._shards.fetcher(0)
        self._samples = fetcher.samples if fetcher is not None else SampleFetcher(self._worker_spec)
        self._making = Making(self._samples)
        self._count = 0
        self._fetched_ns = 0
        spec = self._worker_spec
        self._samples.epoch_seed = self._epoch_seed
        self._getitems = getattr(spec.dataset, "__getitems__", None)
        self._is_default = spec.auto_collation and spec.collate_fn is default_collate
        self._collate = partial(collate, collate_fn_map=fast_map()) if self._is_default else spec.collate_fn
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
        if self._gather is not None or not self._is_default:
            return self._next_direct()
        if not trial.is_undecided:
            return super().next_batch() if trial.uses_slots else self._next_direct()
        began, samples = time.perf_counter_ns(), self._counters.samples
        batch = super().next_batch() if trial.uses_slots else self._next_direct()
        trial.add((time.perf_counter_ns() - began) / max(1, self._counters.samples - samples))
        return batch

    def _next_direct(self) -> Any:
        if not self._waiting:
            raise StopIteration
        indices = next(self._indices)
        self._number += 1
        self.consumed_since.append(Consumed(self._number))
        counters = self._counters
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
        counters.batches += 1
        counters.samples += self._count
        counters.nbytes += _nbytes_of(batch)
        self.consumed, self.consumed_since = self.consumed_since, []
        if counters.recorder is not None:
            stages = {"fetch_ns": fetched - began, "collate_ns": ended - fetched}
            counters.recorder.add("make", began, ended, counters.epochs, self._number, samples=self._count, **stages)
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
                self._count = len(found) if hasattr(found, "__len__") else len(indices)
            else:
                found = samples.fetch_plain(indices if type(indices) is list else [*indices])
                self._count = len(found)
            self._fetched_ns = time.perf_counter_ns()
            if self._is_default and self._trial.is_undecided and type(found) is list and found:
                self._trial.look(sum(array_nbytes(found[0])) * len(found))
            samples.begin_collate()
            return self._collate(found)

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


def _nbytes_of(batch: Any, depth: int = 4) -> int:
    """Return the bytes of the tensors and arrays in a batch, without looking through numbers and text."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return batch.nbytes if isinstance(batch, np.ndarray) or batch.layout is torch.strided else 0
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    elif not isinstance(batch, list | tuple):
        return 0
    if not batch or not depth or (type(batch[0]) in _ATOMS and type(batch[-1]) in _ATOMS):
        return 0
    return sum(_nbytes_of(part, depth - 1) for part in batch)
