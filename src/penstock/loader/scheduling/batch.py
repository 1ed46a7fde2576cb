"""Batches: from the result of a task to what is handed out, in order, and how many bytes they have."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from penstock.core.errors import TransportError
from penstock.loader.counters import Counters
from penstock.loader.sampling.stream_cursor import Consumed
from penstock.loader.transport import codec
from penstock.loader.transport.envelope_plan import EnvelopePlan, EnvelopePlans
from penstock.loader.transport.ring import Ring, Slot
from penstock.loader.workers.messages import Result, Task


class Batch(Task):
    """A batch that is under way or finished: the task for a worker, and what becomes of it.

    What all of them begin with belongs to the class: thousands are made a second, and most get few attributes.

    Args:
        number: within its epoch.
        indices: of its samples.
        slot: where it is to lie.
        taker: the worker that must make it, or whose shard it is from; None on demand.
        epoch_seed: as of `Task`, and so is `packed`.
    """

    seq: int = -1
    """Until it is submitted."""
    is_made: bool = False
    """Whether its result is there."""
    result: Result = Result()
    error: Any = None
    is_empty: bool = False
    """There is nothing to hand out: the stream has ended, or all samples were skipped."""

    def __init__(
        self,
        number: int,
        indices: Any,
        slot: Slot | None,
        taker: int | None = None,
        epoch_seed: int = 0,
        packed: bytes = b"",
    ) -> None:
        self.number = number
        self.indices = indices
        self.slot = slot
        self.taker = self.worker = taker
        self.epoch_seed = epoch_seed
        self.packed = packed

    @property
    def consumed(self) -> Consumed:
        """What handing it out consumes."""
        result = self.result
        return Consumed(self.number, self.taker or 0, result.state, result.ended)

    @property
    def work_ns(self) -> int:
        """How long its worker took."""
        return self.result.fetch_ns + self.result.collate_ns

    def finish(self, result: Result, ring: Ring) -> None:
        """Take the result of its task: commit the slot, or free it if it holds nothing. `ring` is that of the slot."""
        self.result, self.is_made = result, True
        self.error, slot, envelope = result.error, self.slot, result.envelope
        if envelope is not None:
            if result.oversize is not None:
                self.drop(ring)
                try:
                    self.slot = ring.adopt(result.oversize, result.nbytes)
                except TransportError as error:
                    self.error = error
            elif slot is not None:
                if codec.is_inline(envelope):
                    self.drop(ring)
                else:
                    ring.commit(slot, result.nbytes)
        elif self.error is None:
            self.is_empty = not result.is_batch
            self.drop(ring)

    def drop(self, ring: Ring) -> None:
        """Free the slot; the batch will not be handed out of it."""
        if self.slot is not None:
            ring.release(self.slot)
            self.slot = None

    def raise_error(self, ring: Ring) -> None:
        """Raise what making it has raised."""
        self.drop(ring)
        if isinstance(self.error, Exception):
            raise self.error
        self.error.reraise()


class Opener:
    """Opens the batches of one scheduler: their tensors are views of the slot, free when the last of them dies.

    Args:
        ring: of the slots.
        counters: count what is opened.
    """

    def __init__(self, ring: Ring, counters: Counters) -> None:
        self.ring = ring
        self.counters = counters
        self.plans = EnvelopePlans()
        self._batch_bytes = BatchBytes()

    def open(self, batch: Batch) -> Any:
        """Return what the user gets, and count it."""
        result, counters = batch.result, self.counters
        counters.batches += 1
        counters.samples += result.samples
        counters.nbytes += result.nbytes
        envelope = result.envelope
        if envelope is not None:
            return self.opened(batch, envelope, self.plans.of(envelope))
        if not result.nbytes:
            counters.nbytes += self._batch_bytes.of(result.batch)
        return result.batch

    def opened(self, batch: Batch, envelope: bytes, plan: EnvelopePlan | None) -> Any:
        """Return a batch on the host, by its plan if it has one."""
        result, slot = batch.result, batch.slot
        if slot is None:
            self.counters.nbytes += codec.nbytes_of(envelope) - result.nbytes
            self.counters.inline_batches += 1
            if plan is None:
                return codec.decode(envelope, None)
            return plan.open(codec.inline_memory(envelope, plan.inline_start))
        memory = _lend(self.ring, slot, result.nbytes)
        return codec.decode(envelope, memory) if plan is None else plan.open(memory)


def _lend(ring: Ring, slot: Slot, nbytes: int) -> np.ndarray:
    memory = ring.lend(slot)
    if ring.is_tight():
        ring.copied_out += 1
        return memory[:nbytes].copy()
    return memory


class BatchWindow:
    """From `add` (a batch is sent to the workers) through `finish` (it is finished) to `pop_ready` (it is handed out).

    In order, a batch waits for those before it. Out of order, the batch that is finished first is handed out first.
    """

    def __init__(self, *, in_order: bool) -> None:
        self.under_way = 0
        """Batches that were added and have not been handed out."""
        self.next_number = 0
        """The number of the next batch to add."""
        self.next_out = 0
        """In order, the number of the next batch to hand out."""
        self.consumed_since: list[Consumed] = []
        """What was used up since the last batch that was handed out: that batch's own, and batches without samples."""
        self._in_order = in_order
        self._batches: dict[int, Batch] = {}
        """All of them, except that out of order those that are finished are in `_ready`."""
        self._ready: deque[Batch] = deque()

    def add(self, batch: Batch) -> None:
        """Add the batch whose number is `next_number`."""
        self._batches[batch.number] = batch
        self.next_number += 1
        self.under_way += 1

    def get(self, number: int) -> Batch | None:
        """Return a batch that has not been handed out, by its number."""
        return self._batches.get(number)

    def unmade(self) -> int:
        """Return how many batches have no result."""
        return sum(not batch.is_made for batch in self._batches.values())

    def finish(self, batch: Batch) -> None:
        """Out of order: move a finished batch to where it will be handed out."""
        del self._batches[batch.number]
        self._ready.append(batch)  # an empty one, too: it may be the end of a shard with batches before it here

    def pop_ready(self) -> Batch | None:
        """Return the batch to hand out next, if it is finished."""
        while True:
            if self._in_order:
                batch = self._batches.get(self.next_out)
                if batch is None or not batch.is_made:
                    return None
                del self._batches[self.next_out]
                self.next_out += 1
            elif self._ready:
                batch = self._ready.popleft()
            else:
                return None
            self.under_way -= 1
            self.consumed_since.append(batch.consumed)
            if not batch.is_empty:
                return batch

    def take_consumed(self) -> list[Consumed]:
        """Return `consumed_since`, and begin a new one."""
        consumed, self.consumed_since = self.consumed_since, []
        return consumed

    def cancel(self, ring: Ring) -> None:
        """Cancel all batches; slots of those that workers still fill are freed with their last task."""
        for batch in self._batches.values():
            batch.cancelled = True
            if batch.is_made:
                batch.drop(ring)
        self._batches.clear()
        for batch in self._ready:
            batch.drop(ring)
        self._ready.clear()

    def count_ready(self, finished: Collection[Task]) -> int:
        """Return how many batches are finished, given those that wait to be collected.

        May be called by any thread, and raises a RuntimeError if the window changed meanwhile.
        """
        batches = list(self._batches.values())
        finished_batches = [batch for batch in batches if batch.is_made or batch in finished]
        return sum(not batch.is_empty for batch in [*finished_batches, *self._ready])


_ATOMS = frozenset({int, float, bool, str, bytes})
_SEQUENCES = list, tuple


class BatchBytes:
    """Returns the bytes of the tensors and arrays in batches, without looking through numbers and text.

    Of batches of many parts, and of those without a tensor, ever fewer are looked at, at least one in `_LONGEST`;
    others count as the last of them.
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
        if self._parts > self._MANY or not self._last:
            self._left = self._between = min(2 * self._between + 1, self._LONGEST)
        return self._last

    def _look(self, batch: Any, depth: int) -> int:
        self._parts += 1
        if type(batch) is dict:  # before `Mapping`, of which asking takes a microsecond
            batch = [*batch.values()]
        if not isinstance(batch, _SEQUENCES):  # asked first, for this is done for every batch
            if isinstance(batch, torch.Tensor):
                return batch.nbytes if batch.layout is torch.strided else 0
            if isinstance(batch, np.ndarray):
                return batch.nbytes
            if not isinstance(batch, Mapping):
                return 0
            batch = list(batch.values())
        if not batch or not depth or (type(batch[0]) in _ATOMS and type(batch[-1]) in _ATOMS):
            return 0
        nbytes = 0
        for part in batch:
            if type(part) is torch.Tensor and part.layout is torch.strided:
                self._parts += 1
                nbytes += part.nbytes
            else:
                nbytes += self._look(part, depth - 1)
        return nbytes
