"""One batch: from the result of its task to what is handed out."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.core.errors import TransportError
from penstock.loader.counters import Counters
from penstock.loader.sampling.stream_cursor import Consumed
from penstock.loader.scheduling.batch_bytes import BatchBytes
from penstock.loader.transport import codec
from penstock.loader.transport.envelope_plan import EnvelopePlan, EnvelopePlans
from penstock.loader.transport.ring import Ring
from penstock.loader.transport.slot import Slot, SlotState
from penstock.loader.workers.task import Result


class Batch:
    """A batch that is under way or finished.

    What all of them begin with belongs to the class: thousands are made a second, and most get few attributes.

    Args:
        number: within its epoch.
        indices: of its samples.
        slot: where it is to lie.
        worker: that must make it, or whose shard it is from; None on demand.
    """

    tasks_left: int = 0
    """Tasks that have no result yet: one, or none."""
    envelope: bytes | None = None
    value: Any = None
    """The batch itself, if a thread of the training process has made it, and not in its slot."""
    has_value: bool = False
    error: Any = None
    is_empty: bool = False
    """There is nothing to hand out: the stream has ended, or all samples were skipped."""
    cancelled: bool = False
    state: Any = None
    """The state of its shard after it."""
    has_ended: bool = False
    """Its shard is exhausted."""
    samples: int = 0
    nbytes: int = 0
    work_ns: int = 0
    busy_ns: int = 0

    def __init__(self, number: int, indices: Any, slot: Slot | None, worker: int | None = None) -> None:
        self.number = number
        self.indices = indices
        self.slot = slot
        self.worker = worker

    @property
    def consumed(self) -> Consumed:
        """What handing it out consumes."""
        return Consumed(self.number, self.worker or 0, self.state, self.has_ended)

    def add_result(self, result: Result, ring: Ring) -> None:
        """Add the result of its task; `ring` is that of the slot."""
        self.work_ns += result.fetch_ns + result.collate_ns
        self.busy_ns += result.busy_ns
        self.state = result.state
        self.samples, self.nbytes = result.samples, result.nbytes
        if result.envelope is not None:
            self.envelope = result.envelope
            if result.oversize is not None:
                self.drop(ring)
                try:
                    self.slot = ring.adopt(result.oversize, result.nbytes)
                except TransportError as error:
                    self.error = error
        elif result.is_batch:
            self.value, self.has_value = result.batch, True
        elif result.error is not None:
            self.error = result.error
        else:
            self.is_empty, self.has_ended = result.ended or result.empty, result.ended

    def settle(self, ring: Ring) -> None:
        """Commit the slot, or free it if it holds nothing; called when its task has a result."""
        slot = self.slot
        if slot is None:
            return
        if self.is_empty or self.has_value or (self.envelope is not None and codec.is_inline(self.envelope)):
            self.drop(ring)
        elif self.error is None and slot.state is SlotState.FILLING:
            ring.commit(slot, self.nbytes)

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

    def count(self, batch: Batch) -> None:
        """Count a batch that is handed out."""
        counters = self.counters
        counters.batches += 1
        counters.samples += batch.samples
        counters.nbytes += batch.nbytes

    def plan_of(self, batch: Batch) -> EnvelopePlan | None:
        """Return the plan of a batch, once: each look counts as another batch of its kind."""
        return None if batch.envelope is None else self.plans.of(batch.envelope)

    def open(self, batch: Batch) -> Any:
        """Return what the user gets."""
        return self.opened(batch, self.plan_of(batch))

    def opened(self, batch: Batch, plan: EnvelopePlan | None) -> Any:
        """Return a batch on the host, by its plan if it has one."""
        self.count(batch)
        if batch.has_value:
            if not batch.nbytes:
                self.counters.nbytes += self._batch_bytes.of(batch.value)
            return batch.value
        envelope, slot = batch.envelope, batch.slot
        assert envelope is not None
        if slot is None:
            self.counters.nbytes += codec.nbytes_of(envelope) - batch.nbytes
            self.counters.inline_batches += 1
            if plan is None:
                return codec.decode(envelope, None)
            return plan.open(codec.inline_memory(envelope, plan.inline_start))
        memory = _lend(self.ring, slot, batch.nbytes)
        return codec.decode(envelope, memory) if plan is None else plan.open(memory)


def _lend(ring: Ring, slot: Slot, nbytes: int) -> np.ndarray:
    memory = ring.lend(slot)
    if ring.is_tight():
        ring.copied_out += 1
        return memory[:nbytes].copy()
    return memory
