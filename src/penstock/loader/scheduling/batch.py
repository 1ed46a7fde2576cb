"""One batch: from the results of its tasks to what is handed out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch._utils import ExceptionWrapper

from penstock.core.batch_spec import ColumnSpec
from penstock.core.errors import TransportError
from penstock.loader.batch_writer import merge
from penstock.loader.counters import Counters
from penstock.loader.sampling.stream_cursor import Consumed
from penstock.loader.transport import codec
from penstock.loader.transport.arena import Arena
from penstock.loader.transport.plan import Plans
from penstock.loader.transport.ring import Ring
from penstock.loader.transport.slot import Slot, SlotState
from penstock.loader.workers.pool import TaskResult


@dataclass(slots=True, eq=False)
class Batch:
    """A batch that is under way or finished."""

    number: int
    indices: Any
    slot: Slot | None
    worker: int | None = None
    tasks_left: int = 0
    """Tasks that have no result yet."""
    partials: dict[int, TaskResult] = field(default_factory=dict)
    """Results of its tasks by their first row, where several workers fill it."""
    row_stops: dict[int, int] = field(default_factory=dict)
    """Where the rows of each such task end, by their first row."""
    envelope: bytes | None = None
    value: Any = None
    """The batch itself, if the training process has made it."""
    has_value: bool = False
    error: Any = None
    error_row: int = 0
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

    @property
    def consumed(self) -> Consumed:
        """What handing it out consumes."""
        return Consumed(self.number, self.worker or 0, self.state, self.has_ended)

    @property
    def partials_disagree(self) -> bool:
        """Whether the workers that fill it had samples of different shapes."""
        specs = [result.partial[0] for result in self.partials.values() if result.partial is not None]
        return any(spec != specs[0] for spec in specs)

    def add_result(self, result: TaskResult, row: int, ring: Ring) -> None:
        """Add the result of a task.

        Args:
            result: the result.
            row: the first row of the task.
            ring: the ring of the slot.
        """
        self.work_ns += result.fetch_ns + result.collate_ns
        self.busy_ns += result.busy_ns
        self.state = result.state
        if result.error is not None:
            if self.error is None or row < self.error_row:
                self.error, self.error_row = result.error, row
        elif result.ended:
            self.is_empty = self.has_ended = True
        elif result.empty:
            self.is_empty = True
        elif result.task is not None and result.task.rows is not None:
            self._add_partial(result, row, ring)
        elif result.is_batch:
            self.value, self.has_value = result.batch, True
            self.samples, self.nbytes = result.samples, result.nbytes
        else:
            self._add_whole(result, ring)

    def _add_partial(self, result: TaskResult, row: int, ring: Ring) -> None:
        if result.needed_nbytes:
            try:
                ring.require(result.needed_nbytes)
            except TransportError as error:
                self.error = error
        self.partials[row] = result
        self.samples += result.samples
        self.nbytes = max(self.nbytes, result.nbytes)

    def _add_whole(self, result: TaskResult, ring: Ring) -> None:
        self.envelope = result.envelope
        self.samples, self.nbytes = result.samples, result.nbytes
        if result.oversize is not None:
            self.drop(ring)
            try:
                self.slot = ring.adopt(result.oversize, result.nbytes)
            except TransportError as error:
                self.error = error

    def settle(self, ring: Ring) -> None:
        """Commit the slot, or free it if it holds nothing; called when all tasks have a result."""
        if self.is_empty or (self.envelope is not None and codec.is_inline(self.envelope)):
            self.drop(ring)
        elif self.slot is not None and self.error is None and self.slot.state is SlotState.FILLING:
            ring.commit(self.slot, self.nbytes)

    def drop(self, ring: Ring) -> None:
        """Free the slot; the batch will not be handed out of it."""
        if self.slot is not None:
            ring.release(self.slot)
            self.slot = None

    def raise_error(self, ring: Ring) -> None:
        """Raise what making it has raised, if anything."""
        if self.error is None:
            return
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
        self.plans = Plans()

    def count(self, batch: Batch) -> None:
        """Count a batch that is handed out."""
        counters = self.counters
        counters.batches += 1
        counters.samples += batch.samples
        counters.nbytes += batch.nbytes

    def open(self, batch: Batch) -> Any:
        """Return what the user gets."""
        self.count(batch)
        if batch.has_value:
            return batch.value
        envelope, slot = batch.envelope, batch.slot
        if batch.partials:
            return self._merged(batch)
        assert envelope is not None
        plan = self.plans.of(envelope)
        if slot is None:
            self.counters.nbytes += codec.nbytes_of(envelope) - batch.nbytes
            self.counters.inline_batches += 1
            if plan is None:
                return codec.decode(envelope, None)
            return plan.open(codec.inline_memory(envelope, plan.inline_start))
        memory = _lend(self.ring, slot, batch.nbytes)
        return codec.decode(envelope, memory) if plan is None else plan.open(memory)

    def _merged(self, batch: Batch) -> Any:
        """Return a batch that several workers have filled."""
        assert batch.slot is not None
        self.counters.split_batches += 1
        memory = _lend(self.ring, batch.slot, batch.nbytes)
        partials = [partial for row in sorted(batch.partials) if (partial := batch.partials[row].partial) is not None]
        arena = Arena(memory)
        if not isinstance(partials[0][0], ColumnSpec):
            arena.used = batch.nbytes  # the rows are there; what is collated only now comes after them
        try:
            merged = merge(partials, arena)
        except Exception:
            # Samples of different workers that do not collate fail here; report it as a worker's failure.
            error = ExceptionWrapper(where=f"in DataLoader worker process {batch.worker or 0}")
        else:
            if arena.used > batch.nbytes:
                self.ring.note(batch.slot, arena.used)
            return merged
        error.reraise()
        raise AssertionError  # `reraise` has raised


def _lend(ring: Ring, slot: Slot, nbytes: int) -> np.ndarray:
    memory = ring.lend(slot)
    if ring.is_tight():
        ring.copied_out += 1
        return memory[:nbytes].copy()
    return memory
