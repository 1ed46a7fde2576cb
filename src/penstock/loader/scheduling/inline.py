"""Loading in the training process itself (`num_workers=0`), collated into slots that are reused."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.loader.counters import Counters
from penstock.loader.sampling.stream_cursor import Consumed
from penstock.loader.transport.arena import Arena
from penstock.loader.transport.ring import Ring
from penstock.loader.transport.slot import Slot
from penstock.loader.workers.batch_fetcher import BatchFetcher
from penstock.loader.workers.batch_task import Result
from penstock.loader.workers.stateful import is_stateful
from penstock.loader.workers.stream_shard import StreamShard, StreamShards, install_info
from penstock.loader.workers.worker_spec import WorkerSpec

_NOTHING = np.empty(0, np.uint8)


class InlineScheduler:
    """Makes each batch when it is asked for. Reuse alone is most of the gain: a fresh batch costs its page faults."""

    pool = None
    may_be_kept = False
    """Whether the next pass may begin with this object, for all that a program can tell."""

    def __init__(self, worker_spec: WorkerSpec, ring: Ring, counters: Counters) -> None:
        self._worker_spec = worker_spec
        self._ring = ring
        self._counters = counters
        self._shards = StreamShards(worker_spec, {}, functools.partial(install_info, base_seed=0))
        self._slot: Slot | None = None
        self.consumed_since: list[Consumed] = []
        """What was used up since the last batch that was handed out: batches without samples."""
        self.consumed: Sequence[Consumed] = ()
        """What handing out the last batch has used up."""

    def begin(
        self,
        indices: Iterator[Any],
        *,
        base_seed: int,
        epoch_seed: int,
        shards: Sequence[StreamShard] = (),
        turn: int = 0,
    ) -> None:
        """Begin a pass; the one before need not have come to its end."""
        is_iterable = self._worker_spec.iterable
        self._indices = indices
        self._epoch_seed = epoch_seed
        self._number = -1
        self.consumed_since, self.consumed = [], ()
        if shards or is_iterable:
            self._shards.install_info = functools.partial(install_info, base_seed=base_seed)
            try:
                self._shards.begin(dict(enumerate(shards)))
            finally:
                self._shards.deactivate()
        self._waiting = deque(range(len(shards) if is_iterable else 1))
        """Shards that have batches left, from the one whose turn is next; 0 for map-style datasets."""
        if is_iterable:
            self._waiting.rotate(-turn)
            for shard in [shard for shard in self._waiting if shards[shard].has_ended]:
                self._waiting.remove(shard)

    def next_batch(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: the epoch is over.
        """
        while self._waiting:
            indices = next(self._indices)
            shard = self._waiting[0]
            self._number += 1
            self.consumed_since.append(Consumed(self._number, shard))
            began = time.perf_counter_ns()
            try:
                fetched = self._make(shard, indices)
            finally:
                slot, self._slot = self._slot, None
                self._counters.inline_ns += time.perf_counter_ns() - began
            counters = self._counters
            counters.fetch_ns += fetched.fetch_ns
            counters.collate_ns += fetched.collate_ns
            counters.asleep_ns += max(0, fetched.fetch_ns + fetched.collate_ns - fetched.busy_ns)
            counters.skip(fetched.skipped)
            if fetched.empty:
                continue
            if fetched.ended:
                self._waiting.popleft()
                self.consumed_since[-1] = Consumed(self._number, shard, has_ended=True)
                continue
            self._waiting.rotate(-1)
            self.consumed, self.consumed_since = self.consumed_since, []
            if counters.recorder is not None:
                made = fetched.began_ns, fetched.fetch_ns, fetched.collate_ns, fetched.samples
                counters.recorder.made = made
            counters.batches += 1
            counters.samples += fetched.samples
            if slot is not None and fetched.arena is not None:
                counters.nbytes += fetched.arena.used
                self._ring.note(slot, fetched.arena.used)
            return fetched.batch
        raise StopIteration

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

    @staticmethod
    def close() -> None:
        """Do nothing: there are no workers. Without a reference to this object, which a finalizer would keep alive."""

    def try_next(self) -> tuple[Any] | None:
        """Return None: making a batch now would delay the step that is about to start."""
        return None

    def _make(self, shard: int, indices: Any) -> Result:
        fetcher = self._shards.fetcher(shard)
        assert fetcher is not None
        try:
            # No slot until the first sample shows that the batch is large enough to gain by one.
            return fetcher.make(indices, Arena(_NOTHING), epoch_seed=self._epoch_seed, enlarge=self._enlarge)
        finally:
            self._shards.deactivate()

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
