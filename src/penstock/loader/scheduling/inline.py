"""Loading in the training process itself (`num_workers=0`).

    plain     nothing was asked for but torch's batches: samples are fetched and collated. torch takes 20 µs for a
              batch, so nothing is done here for each sample, and little for each batch
    others    several shards, datasets with a state, `seed=`, `errors=`, pinned slots: as a worker makes them

A dataset that lies in memory is gathered, if that is proven to give the same batch (see `in_memory`). Large batches are
collated into slots that are reused: a fresh batch costs its page faults.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate

from penstock.loader.checkpoint.epoch_state import EpochState
from penstock.loader.collate import arena_needed, collates_as_torch, fast_map, in_arena
from penstock.loader.counters import Counters
from penstock.loader.in_memory import CannotGatherError, Gather, gather_of
from penstock.loader.sampling.stream_cursor import Consumed
from penstock.loader.scheduling.batch import BatchBytes
from penstock.loader.transport.arena import Arena
from penstock.loader.transport.ring import Ring, Slot
from penstock.loader.workers.busy_time import WORTH_MEASURING_NS, BusyTime
from penstock.loader.workers.fetcher import BatchFetcher, add_origin
from penstock.loader.workers.sample_seed import this_thread
from penstock.loader.workers.stream_shard import StreamShard, StreamShards, install_info
from penstock.loader.workers.worker_spec import WorkerSpec, is_stateful

_NOTHING = np.empty(0, np.uint8)
_EMPTY, _ENDED = object(), object()
"""In place of a batch: all of its samples were left out; its shard has none any more."""

_LARGE_NBYTES = 1 << 20
"""Of a plain batch. Smaller ones fit into what the heap keeps, and a slot costs more than it saves."""

_SHORT_PASS = 64
"""Batches. In fewer, the new pages of three slots cost more than slots save where the heap keeps its blocks."""


class InlineScheduler:
    """Makes each batch when it is asked for. `begin` for each pass, then `next_batch` until StopIteration.

    Args:
        worker_spec: what is made.
        ring: of the slots.
        counters: of the loader.
        pins: whether batches have to lie in pinned slots.
    """

    pool = None
    is_open = False

    def __init__(self, worker_spec: WorkerSpec, ring: Ring, counters: Counters, *, pins: bool = False) -> None:
        self._worker_spec = worker_spec
        self._ring = ring
        self._counters = counters
        self._shards = StreamShards(worker_spec, {}, functools.partial(install_info, base_seed=0))
        self._slot: Slot | None = None
        self.consumed_since: list[Consumed] = []
        """What was used up since the last batch that was handed out: batches without samples."""
        self.consumed: Sequence[Consumed] = ()
        """What handing out the last batch has used up."""
        self._may_be_plain = not (pins or worker_spec.seeded or worker_spec.errors != "raise")
        self._may_be_plain &= not hasattr(worker_spec.collate_fn, "collate_into")
        self.is_plain = False
        """Whether this pass is; the next may then begin with this object, for all that a program can tell."""
        self._is_default = worker_spec.auto_collation and worker_spec.collate_fn is default_collate
        self._collate: Callable[[Any], Any] = worker_spec.collate_fn
        self._gather: Gather | None = None
        self._getitems: Any = None
        self._knows_collate = False
        """Whether `_collate` and `_gather` stay right for as long as `default_collate` is torch's."""
        self._way: str | None = None
        """How plain batches are made that `default_collate` makes: on the "heap", in a "slot", or there by "rows", each
        sample as it comes; None until there is a first one, which shows it."""
        self._busy_time = BusyTime(with_process=True)
        self._batch_bytes = BatchBytes()

    def begin(self, epoch: EpochState) -> None:
        """Begin a pass; the one before need not have come to its end."""
        is_iterable, shards = self._worker_spec.iterable, epoch.shards
        self._epoch = epoch
        self._number = -1
        self.consumed_since, self.consumed = [], ()
        if shards:
            self._shards.install_info = functools.partial(install_info, base_seed=epoch.base_seed)
            try:
                self._shards.begin(dict(enumerate(shards)))
            finally:
                self._shards.deactivate()
            epoch.read_shards_with(self.current_shard)
        self._waiting = deque(range(len(shards) if is_iterable else 1))
        """Shards that have batches left, from the one whose turn is next; 0 for map-style datasets."""
        if is_iterable:
            self._waiting.rotate(-epoch.turn)
            for shard in [shard for shard in self._waiting if shards[shard].has_ended]:
                self._waiting.remove(shard)
        is_one = not shards or (is_iterable and len(shards) == 1 and not shards[0].of)
        self.is_plain = self._may_be_plain and is_one
        if self.is_plain:
            self._begin_plain(epoch)

    def next_batch(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: the pass is over.
        """
        while self._waiting:
            indices, shard = next(self._epoch.indices), self._waiting[0]
            self._number += 1
            self.consumed_since.append(Consumed(self._number, shard))
            batch = self.make_plain(indices) if self.is_plain else self._make(shard, indices)
            if batch is _EMPTY:
                continue
            if batch is _ENDED:
                self._waiting.popleft()
                self.consumed_since[-1] = Consumed(self._number, shard, has_ended=True)
                continue
            self._waiting.rotate(-1)
            if self._epoch.wants_states:
                state = self.current_shard(shard, StreamShard(number=0, of=0)).state
                self.consumed_since[-1] = Consumed(self._number, shard, state)
            self.consumed, self.consumed_since = self.consumed_since, []
            return batch
        raise StopIteration

    def try_next(self) -> tuple[Any] | None:
        """Return None: making a batch now would delay the step that is about to start."""
        return None

    @staticmethod
    def close() -> None:
        """Do nothing: there are no workers. Without a reference to this object, which a finalizer would keep alive."""

    def current_shard(self, position: int, shard: StreamShard) -> StreamShard:
        """Return a shard of an iterable dataset as it is now."""
        fetcher = self._shards.fetcher(position)
        self._shards.deactivate()
        # What has given no sample of this pass may tell the end of the last one, or not have looked at its state yet.
        if fetcher is None or not self._has_given(fetcher, shard):
            return shard
        if shard.has_ended or fetcher.samples.has_ended:
            end = fetcher.samples.end_state()
            is_said = shard.has_ended and end is shard.end is None
            return shard if is_said else shard.at_end(end)
        state = fetcher.samples.stream_state()
        return shard if state is None else replace(shard, state=state, since=())

    def _has_given(self, fetcher: BatchFetcher, shard: StreamShard) -> bool:
        if not self._worker_spec.iterable:
            return self._number >= 0 or shard.state is None
        if shard.state is None and not is_stateful(self._worker_spec.dataset):
            return True  # it is the iterator that is asked, and it is of this pass
        begun_at = 0 if shard.state is None else shard.state[2]
        return fetcher.samples.has_ended or fetcher.samples.position != begun_at

    # ── as a worker makes them ──────────────────────────────────────────────────────────────────────────────

    def _make(self, shard: int, indices: Any) -> Any:
        began = time.perf_counter_ns()
        fetcher = self._shards.fetcher(shard)
        assert fetcher is not None
        try:
            # No slot until the first sample shows that the batch is large enough to gain by one.
            made = fetcher.make(indices, Arena(_NOTHING), epoch_seed=self._epoch.epoch_seed, enlarge=self._enlarge)
        finally:
            slot, self._slot = self._slot, None
            self._shards.deactivate()
            self._counters.inline_ns += time.perf_counter_ns() - began
        counters = self._counters
        counters.fetch_ns += made.fetch_ns
        counters.collate_ns += made.collate_ns
        counters.asleep_ns += max(0, made.fetch_ns + made.collate_ns - made.busy_ns)
        counters.skip(made.skipped)
        if made.empty or made.ended:
            return _EMPTY if made.empty else _ENDED
        if counters.recorder is not None:
            counters.recorder.made = made.began_ns, made.fetch_ns, made.collate_ns, made.samples
        counters.batches += 1
        counters.samples += made.samples
        if slot is not None and made.arena is not None:
            counters.nbytes += made.arena.used
            self._ring.note(slot, made.arena.used)
        return made.batch

    def _enlarge(self, nbytes: int) -> Arena:
        slot = self._ring.acquire_larger(nbytes)
        if slot is None:  # the user holds all that the budget allows: an ordinary batch in private memory
            self._ring.copied_out += 1
            return Arena(np.empty(nbytes, np.uint8))
        return Arena(self._lend(slot))

    def _lend(self, slot: Slot) -> np.ndarray:
        """Lend `slot` before it is filled; it is free again when the last view of it dies, or at once without any."""
        self._slot = slot
        self._ring.commit(slot, 0)
        return self._ring.lend(slot)

    # ── plain ───────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_plain(self, epoch: EpochState) -> None:
        """Begin a plain pass; the program may have changed since the last what its batches are made with."""
        spec, fetcher = self._worker_spec, self._shards.fetcher(0)
        self._fetcher = fetcher or BatchFetcher(spec, in_training_process=True)
        self._samples = self._fetcher.samples
        self._samples.epoch_seed = epoch.epoch_seed
        self._fetching = spec.fetching
        getitems, self._getitems = self._getitems, None
        if self._fetching is None:
            self._getitems = getattr(spec.dataset, "__getitems__", None)
        self._knows_collate = self._knows_collate and getitems == self._getitems
        if self._is_default:
            self._choose_collate()
        self._is_usual = spec.auto_collation and not (spec.iterable or self._getitems or self._fetching)
        """Whether samples are fetched one by one, and nothing else is to be done."""
        cursor = epoch.batch_cursor
        self._draws_tensors = self._gather is not None and cursor is not None and cursor.draw_tensors()

    def _choose_collate(self) -> None:
        is_torchs = collates_as_torch()
        if self._knows_collate and is_torchs and (self._gather is None or self._gather.is_current()):
            return
        self._knows_collate = is_torchs
        self._fast_map = fast_map()
        self._collate = functools.partial(collate, collate_fn_map=self._fast_map)
        self._gather = None if self._worker_spec.iterable else gather_of(self._worker_spec.dataset)

    def make_plain(self, indices: Any) -> Any:
        """Return a plain batch; `_ENDED` where the stream has none."""
        if self._way == "rows":
            return self._make(0, indices)
        busy_time = self._busy_time
        if is_slow := busy_time.is_slow:
            busy_time.begin()
        began = self._fetched_ns = time.perf_counter_ns()
        batch = self._make_of_samples(indices) if self._gather is None else self._make_by_gather(indices)
        if batch is _ENDED:
            return batch
        ended, fetched, counters = time.perf_counter_ns(), self._fetched_ns, self._counters
        passed = ended - began
        counters.inline_ns += passed
        counters.fetch_ns += fetched - began
        counters.collate_ns += ended - fetched
        if is_slow or passed >= WORTH_MEASURING_NS:
            counters.asleep_ns += max(0, passed - busy_time.end(passed))
        counters.batches += 1
        counters.samples += self._samples_in_batch
        counters.nbytes += self._batch_bytes.of(batch)
        if counters.recorder is not None:
            counters.recorder.made = began, fetched - began, ended - fetched, self._samples_in_batch
        return batch

    def _make_by_gather(self, indices: Any) -> Any:
        assert self._gather is not None
        with contextlib.suppress(CannotGatherError):
            batch = self._gather(indices)
            self._samples_in_batch = len(indices)
            return batch
        is_drawn = self._draws_tensors and type(indices) is torch.Tensor
        return self._make_of_samples(indices.tolist() if is_drawn else indices)

    def _make_of_samples(self, indices: Any) -> Any:
        samples, outer = self._samples, this_thread.fetcher
        this_thread.fetcher, this_thread.sample = samples, None  # as `Making` does
        try:
            if self._is_usual and type(indices) is list:
                found: Any = samples.fetch_plain(indices)
                self._samples_in_batch = len(found)
            else:
                found = self._fetch(indices)
                if found is _ENDED:
                    return found
            self._fetched_ns = time.perf_counter_ns()
            samples.begin_collate()
            return self._collate(found) if self._way == "heap" or not self._is_default else self._collate_large(found)
        finally:
            this_thread.fetcher = outer

    def _fetch(self, indices: Any) -> Any:
        """Return the samples of a batch; without automatic batching a sample; `_ENDED` where the stream has none."""
        spec, samples = self._worker_spec, self._samples
        if spec.iterable:
            return self._next_of_stream(indices)
        if not spec.auto_collation:
            self._samples_in_batch = 1
            return samples.fetch_plain((indices,))[0]
        if self._getitems:
            return self._fetch_bulk(indices)
        known = indices if type(indices) is list else list(indices)
        if self._fetching is None:
            found = samples.fetch_plain(known)
        else:
            with self._fetching(known):
                found = samples.fetch_plain(known)
        self._samples_in_batch = len(found)
        return found

    def _fetch_bulk(self, indices: Any) -> Any:
        self._samples.begin_bulk(indices)
        try:
            found = self._worker_spec.dataset.__getitems__(indices)
        except Exception as error:
            add_origin(error, f"one of the samples {indices!r} of the dataset")
            raise
        self._samples_in_batch = len(found) if hasattr(found, "__len__") else 0
        return found

    def _next_of_stream(self, indices: Any) -> Any:
        spec, samples = self._worker_spec, self._samples
        wanted = len(indices) if spec.auto_collation else 1
        found = [] if samples.has_ended else samples.fetch_next_plain(wanted)
        if not found or (spec.drop_last and len(found) < wanted):
            return _ENDED
        self._samples_in_batch = len(found)
        return found if spec.auto_collation else found[0]

    def _collate_large(self, samples: Any) -> Any:
        """Collate samples of which nobody knows yet that they make a small batch; in a slot where it is large."""
        if type(samples) is not list or not samples:
            return self._collate(samples)
        needed, by_rows = arena_needed(samples[0], len(samples))
        if self._way is None:
            length = self._counters.length
            is_short = length is not None and length < _SHORT_PASS
            self._way = "heap" if needed < _LARGE_NBYTES or is_short else "rows" if by_rows else "slot"
        slot = self._ring.acquire_larger(needed) if needed and self._way != "heap" else None
        if slot is None:
            return self._collate(samples)
        arena = Arena(self._lend(slot))
        self._slot = None
        batch = collate(samples, collate_fn_map=in_arena(self._fast_map, arena))
        self._ring.note(slot, arena.used)
        return batch
