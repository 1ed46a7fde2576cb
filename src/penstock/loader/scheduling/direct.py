"""Loading in the training process as torch does it: fetch the samples, collate them, hand out the batch.

For loops that ask for nothing else: no error policy, no seed per sample, no pinning. What torch does for a batch takes
20 µs, so nothing is done here for each sample, and little for each batch.

A dataset that lies in memory is gathered, if that is proven to give the same batch (see `in_memory`). Large batches are
collated into reused slots where that saves the page faults of fresh memory, which is measured (see `SlotTrial`).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate

from penstock.loader.batch_writer import arena_needed
from penstock.loader.collate import collates_as_torch, fast_map, in_arena
from penstock.loader.in_memory import CannotGatherError, Gather, gather_of
from penstock.loader.sampling.batch_cursor import BatchCursor
from penstock.loader.sampling.stream_cursor import Consumed
from penstock.loader.scheduling.batch_bytes import BatchBytes
from penstock.loader.scheduling.inline import InlineScheduler
from penstock.loader.transport.arena import Arena
from penstock.loader.workers.busy_time import WORTH_MEASURING_NS, BusyTime
from penstock.loader.workers.sample_fetcher import SampleFetcher, add_origin
from penstock.loader.workers.sample_seed import this_thread

_LARGE_NBYTES = 1 << 20
"""Of a batch. Smaller ones fit into what the heap keeps, and a slot costs more than it saves."""

_WARM_UP = 3
_MEASURED = 5
_WORTH = 0.9
"""The other way must have taken at most this share of the time."""

_SHORT_EPOCH = 64
"""Batches. In fewer, the new pages of three slots cost more than slots save where the heap keeps its blocks."""

_LONGEST = 2048
"""The most batches between two looks; the number doubles with each change of the way, so that changes become rare."""


class DirectScheduler(InlineScheduler):
    """Makes each batch when it is asked for; of a map-style dataset, or of one stream.

    Args:
        arguments: as of `InlineScheduler`, and so are `others`.
        trial: whether to use slots.
        busy_time: measures the batches of all passes, as does `batch_bytes`.
    """

    may_be_kept = True

    def __init__(
        self, *arguments: Any, trial: SlotTrial, busy_time: BusyTime, batch_bytes: BatchBytes, **others: Any
    ) -> None:
        super().__init__(*arguments, **others)
        self._trial = trial
        self._busy_time = busy_time
        self._batch_bytes = batch_bytes
        self._count = 0
        self._fetched_ns = 0
        spec = self._worker_spec
        self._is_default = spec.auto_collation and spec.collate_fn is default_collate
        self._collate: Callable[[Any], Any] = spec.collate_fn
        self._gather: Gather | None = None
        self._getitems: Any = None
        self._knows_collate = False
        """Whether `_collate` and `_gather` stay right for as long as `default_collate` is torch's."""

    def begin(self, indices: Iterator[Any], *, epoch_seed: int, **others: Any) -> None:
        """Begin a pass; the program may have changed since the one before what its batches are made with."""
        super().begin(indices, epoch_seed=epoch_seed, **others)
        spec, fetcher = self._worker_spec, self._shards.fetcher(0)
        self._samples = fetcher.samples if fetcher is not None else SampleFetcher(spec)
        self._samples.epoch_seed = epoch_seed
        self._fetching = spec.fetching
        getitems, self._getitems = self._getitems, None
        if self._fetching is None:
            self._getitems = getattr(spec.dataset, "__getitems__", None)
        self._knows_collate = self._knows_collate and getitems == self._getitems
        if self._is_default:
            self._choose_collate()
        self._draws_tensors = self._gather is not None and isinstance(indices, BatchCursor) and indices.draw_tensors()

    def _choose_collate(self) -> None:
        is_torchs = collates_as_torch()
        if self._knows_collate and is_torchs and (self._gather is None or self._gather.is_current()):
            return
        self._knows_collate = is_torchs
        self._fast_map = fast_map()
        self._collate = partial(collate, collate_fn_map=self._fast_map)
        self._gather = None if self._worker_spec.iterable else gather_of(self._worker_spec.dataset)

    def next_batch(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: the epoch is over.
        """
        trial = self._trial
        if not trial.is_wanted or self._gather is not None or not self._is_default:
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
        counters, busy_time = self._counters, self._busy_time
        if is_slow := busy_time.is_slow:
            busy_time.begin()
        began = self._fetched_ns = time.perf_counter_ns()
        try:
            batch = self._make_of_samples(indices) if self._gather is None else self._make_by_gather(indices)
        except _EndedError:
            self._waiting.clear()
            self.consumed_since[-1] = Consumed(self._number, has_ended=True)
            raise StopIteration from None
        ended, fetched = time.perf_counter_ns(), self._fetched_ns
        passed = ended - began
        counters.inline_ns += passed
        counters.fetch_ns += fetched - began
        counters.collate_ns += ended - fetched
        if is_slow or passed >= WORTH_MEASURING_NS:
            counters.asleep_ns += max(0, passed - busy_time.end(passed))
        counters.batches += 1
        counters.samples += self._count
        counters.nbytes += self._batch_bytes.of(batch)
        self.consumed, self.consumed_since = self.consumed_since, []
        if counters.recorder is not None:
            counters.recorder.made = (began, fetched - began, ended - fetched, self._count)
        return batch

    def _make_by_gather(self, indices: Any) -> Any:
        assert self._gather is not None
        with contextlib.suppress(CannotGatherError):
            batch = self._gather(indices)
            self._count = len(indices)
            return batch
        is_drawn = self._draws_tensors and type(indices) is torch.Tensor
        return self._make_of_samples(indices.tolist() if is_drawn else indices)

    def _make_of_samples(self, indices: Any) -> Any:
        samples, outer = self._samples, this_thread.fetcher
        this_thread.fetcher, this_thread.sample = samples, None  # as `Making` does
        try:
            found = self._fetch(indices)
            self._fetched_ns = time.perf_counter_ns()
            samples.begin_collate()
            if self._is_default and self._trial.is_wanted and type(found) is list and found:
                return self._collate_large(found)
            return self._collate(found)
        finally:
            this_thread.fetcher = outer

    def _fetch(self, indices: Any) -> Any:
        """Return the samples of a batch; without automatic batching a sample."""
        spec, samples = self._worker_spec, self._samples
        if spec.iterable:
            return self._next_of_stream(indices)
        if not spec.auto_collation:
            self._count = 1
            return samples.fetch_plain((indices,))[0]
        if self._getitems:
            return self._fetch_bulk(indices)
        known = indices if type(indices) is list else list(indices)
        if self._fetching is None:
            found = samples.fetch_plain(known)
        else:
            with self._fetching(known):
                found = samples.fetch_plain(known)
        self._count = len(found)
        return found

    def _fetch_bulk(self, indices: Any) -> Any:
        self._samples.begin_bulk(indices)
        try:
            found = self._worker_spec.dataset.__getitems__(indices)
        except Exception as error:
            add_origin(error, f"one of the samples {indices!r} of the dataset")
            raise
        self._count = len(found) if hasattr(found, "__len__") else 0
        return found

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


class SlotTrial:
    """Decides where a loop's next large batch is to be made. Lives as long as its loader.

    Fresh memory costs its page faults, unless the C heap happens to keep the block of an earlier batch. That depends on
    what else the program has freed, and may change at any time. So both ways are measured, the one in use all the time.

    The first batches are made in slots, the next ones in fresh memory; after that the way is changed when it takes
    longer than the other one took. Slots have new pages in each epoch, so short epochs have none.
    """

    def __init__(self) -> None:
        self.uses_slots = False
        """Where the next batch is to be made."""
        self.is_wanted = True
        """Whether the next batch has to be measured, or looked at."""
        self.by_rows = False
        """Whether samples are so large that each is copied to its row of the slot as soon as it is made."""
        self._is_large = False
        self._recent: list[float] = []
        self._typical: dict[bool, float] = {}
        """What a sample takes in slots (True) and in fresh memory."""
        self._until_look = _WARM_UP + _MEASURED

    def look(self, nbytes: int, *, by_rows: bool, epoch: int | None = None) -> None:
        """Begin, if the loop's first batch is large; `epoch` is how many batches an epoch has, if that is known."""
        if not self._is_large:
            is_short = epoch is not None and epoch < _SHORT_EPOCH
            self._is_large = self.is_wanted = self.uses_slots = nbytes >= _LARGE_NBYTES and not is_short
            self.by_rows = by_rows

    def add(self, ns_per_sample: float) -> None:
        """Record a batch that was made as `uses_slots` says."""
        if not self._is_large:
            return
        self._recent.append(ns_per_sample)
        if len(self._recent) < self._until_look:
            return
        typical = self._typical[self.uses_slots] = statistics.median(self._recent[-_MEASURED:])
        self._recent.clear()
        other = self._typical.get(not self.uses_slots)
        if other is None or other <= _WORTH * typical:
            self.uses_slots = not self.uses_slots
        if other is not None:
            self._until_look = min(2 * self._until_look, _LONGEST)
