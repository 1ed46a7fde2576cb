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
from penstock.loader.transport.slot import Slot
from penstock.loader.workers.batch_task import Result


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
    result: Result = Result()
    """Of its task, when that is there."""
    error: Any = None
    is_empty: bool = False
    """There is nothing to hand out: the stream has ended, or all samples were skipped."""
    cancelled: bool = False

    def __init__(self, number: int, indices: Any, slot: Slot | None, worker: int | None = None) -> None:
        self.number = number
        self.indices = indices
        self.slot = slot
        self.worker = worker

    @property
    def consumed(self) -> Consumed:
        """What handing it out consumes."""
        result = self.result
        return Consumed(self.number, self.worker or 0, result.state, result.ended)

    @property
    def work_ns(self) -> int:
        """How long its worker took."""
        return self.result.fetch_ns + self.result.collate_ns

    def finish(self, result: Result, ring: Ring) -> None:
        """Take the result of its task: commit the slot, or free it if it holds nothing. `ring` is that of the slot."""
        self.result = result
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

    def count(self, batch: Batch) -> None:
        """Count a batch that is handed out."""
        counters = self.counters
        counters.batches += 1
        counters.samples += batch.result.samples
        counters.nbytes += batch.result.nbytes

    def plan_of(self, batch: Batch) -> EnvelopePlan | None:
        """Return the plan of a batch, once: each look counts as another batch of its kind."""
        return None if batch.result.envelope is None else self.plans.of(batch.result.envelope)

    def open(self, batch: Batch) -> Any:
        """Return what the user gets."""
        return self.opened(batch, self.plan_of(batch))

    def opened(self, batch: Batch, plan: EnvelopePlan | None) -> Any:
        """Return a batch on the host, by its plan if it has one."""
        self.count(batch)
        result, slot = batch.result, batch.slot
        envelope = result.envelope
        if envelope is None:
            if not result.nbytes:
                self.counters.nbytes += self._batch_bytes.of(result.batch)
            return result.batch
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
