"""Copies batches from their slots to the device, on a side stream, while the consumer computes.

When batch k is handed out, the copies of the next two start, if their host batches are there already. If the next one
is not, only its destination is allocated (batches mostly have the same shapes): the copy then waits for what the device
had been given before step k, not for step k itself, however late it starts. So it is with `num_workers=0`, where a
batch is made when it is asked for, while the device is still at the step before.

Most batches are a tree of tensors in a slot, and come as they lie there (`InSlot`): parts of the slot are copied, no
host tensor is made, and the slot is free when the copy is over. Of other batches each part is moved by itself, and the
host batch is kept until the event of its copy has passed; then its views die, and its slot is free.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch

from penstock.core.tree import map_leaves, tensors
from penstock.device.base import Device, Event, Mark, Memory, TensorSpec
from penstock.device.oom import is_out_of_memory
from penstock.loader.checkpoint.epoch_state import EpochState
from penstock.loader.counters import Counters
from penstock.loader.sampling.stream_cursor import Consumed
from penstock.loader.to_device.copy_plan import CopyPlan, InSlot
from penstock.loader.transport.ring import MOST_PENDING

_WHOSE_ERROR = (
    "It was reported while penstock asked for a copy, which runs no kernel: what failed was started by the program "
    "before. CUDA_LAUNCH_BLOCKING=1 shows where. After it this process can use the device no more."
)

_WITHOUT_MEMORY = (str, bytes, int, float, complex, np.generic, type(None))

DEPTH = 2
"""Batches copied ahead of the one in use, at most: one overlaps with the step, another absorbs jitter."""

_TIMED_EVERY = 64
"""In one of so many steps the device's wait for its batch is timed; the first is the ninth."""


class BatchSource(Protocol):
    """What batches come from: a scheduler with workers or without, a live source, the prefetcher before any of them.

    All methods are called in the thread that iterates. Before a prefetcher a batch may be an `InSlot`.
    """

    def next_batch(self) -> Any:
        """Return the next batch; raises StopIteration at the end."""
        ...

    def try_next(self) -> tuple[Any] | None:
        """Return the next batch, in a tuple, if there is one without waiting; raises as `next_batch` does."""
        ...

    @property
    def close(self) -> Callable[[], object]:
        """Ends what is under way; batches that were handed out stay valid."""
        ...


class PassSource(BatchSource, Protocol):
    """A source of a loader's passes, which are begun one after another."""

    @property
    def consumed(self) -> Sequence[Consumed]:
        """What handing out the last batch has used up."""
        ...

    def begin(self, epoch: EpochState) -> None:
        """Begin a pass; what is left of an earlier one is dropped."""
        ...


class _Arrival(NamedTuple):
    """A batch whose copy is under way."""

    host: Any
    """An `InSlot`, or the host batch."""
    tensors: list[torch.Tensor]
    """Where it will be on the device."""
    stream: object
    """The consumer's, that they were allocated on."""
    leaves: Sequence[torch.Tensor]
    """Of the host batch, those that `tensors` are the destinations of."""
    event: Event
    consumed: Sequence[Consumed]
    nbytes: int


class InFlightCopies:
    """The copies under way. It has no reference to the source of batches, so that it can outlive the loader."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.arriving: deque[_Arrival] = deque()
        self.leaving: deque[tuple[Any, Event]] = deque()
        """Host batches that were handed out, until their copies are over."""

    def close(self) -> None:
        """Drop what will not be asked for; waits for its copies, so that the memory may be reused."""
        # After an error that breaks the device nothing runs there any more, and the program has had the error.
        with contextlib.suppress(torch.AcceleratorError), self.device.outside_capture():
            for event in [*(arrival.event for arrival in self.arriving), *(event for _, event in self.leaving)]:
                event.synchronize()
        while self.arriving:
            arrival = self.arriving.popleft()
            arrival.event.close()
            if type(arrival.host) is InSlot:
                arrival.host.ring.release(arrival.host.slot)
        while self.leaving:
            self.leaving.popleft()[1].close()


class Prefetcher:
    """Hands out batches on the device.

    Args:
        source: gives host batches.
        device: where they go.
        budget_nbytes: the most bytes of device memory that batches under way may take; one is always allowed.
        counters: counts copies, and times how long the device waits for some.
        keep: called with each leaf that stays on the host and may hold memory (an array, an object of a class of the
            user's), which the user may copy from; returns what to hand out in its place.
        consumed_of: returns what the last batch of `source` consumed; `consumed` is then that of the one handed out.
    """

    def __init__(
        self,
        source: BatchSource,
        device: Device,
        *,
        budget_nbytes: int,
        counters: Counters,
        keep: Callable[[Any], Any] = lambda leaf: leaf,
        consumed_of: Callable[[], Sequence[Consumed]] = tuple,
    ) -> None:
        self._source = source
        self._device = device
        self._budget = budget_nbytes
        self._counters = counters
        self._keep = keep
        self.in_flight = InFlightCopies(device)
        self._arriving, self._leaving = self.in_flight.arriving, self.in_flight.leaving
        self._error: Exception | None = None
        self._layout: Hashable = None
        """Of the batch that was sent last."""
        self._consumed_of = consumed_of
        self.consumed: Sequence[Consumed] = ()
        self._reserved: tuple[Hashable, Memory] | None = None
        """Memory for the batch that comes next, if it has the same layout."""
        self._marks: tuple[Mark, Mark] | None = None
        """Around the consumer's wait for a copy, until both have passed."""

    def next_batch(self) -> Any:
        """Return the next batch, on the device and ordered on the current stream.

        Raises:
            StopIteration: the epoch is over.
            torch.OutOfMemoryError: the device has no room for the batch.
        """
        try:
            with self._device.outside_capture():
                return self._next_batch()
        except torch.AcceleratorError as error:
            if not is_out_of_memory(error):
                error.add_note(_WHOSE_ERROR)
            raise

    def try_next(self) -> tuple[Any] | None:
        """Return the next batch, in a tuple, if its copy has started, or it is there without waiting."""
        if not self._arriving:
            with self._device.outside_capture():
                self._look_ahead()
        if not self._arriving:
            self._raise_error()
            return None
        return (self.next_batch(),)

    def begin(self, epoch: EpochState) -> None:
        """Begin a pass of the source, which is a loader's."""
        self.close()
        cast(PassSource, self._source).begin(epoch)

    def close(self) -> None:
        """End the copies under way, and drop their batches."""
        self._reserved = self._error = None
        self._marks = None
        self.in_flight.close()
        self._counters.uploading_nbytes = 0

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _next_batch(self) -> Any:
        if self._leaving:
            self._drop_finished()
        if not self._arriving:
            self._raise_error()
            self._send(self._source.next_batch())
        arrival, device, counters = self._arriving.popleft(), self._device, self._counters
        self.consumed = arrival.consumed
        counters.uploads += 1
        if self._marks is not None:
            self._count_wait(*self._marks)
        is_timed = counters.uploads % _TIMED_EVERY == 9
        stream = self._wait_timed(arrival.event) if is_timed else device.wait_event(arrival.event)
        host, tensors = arrival.host, arrival.tensors
        if arrival.stream != stream:
            for tensor in tensors:
                device.record_use(tensor)
        if type(host) is InSlot:
            batch = host.plan.build(tensors)
            host.ring.free_after(host.slot, arrival.event)
        else:
            batch = self._move(arrival)
        counters.uploading_nbytes -= arrival.nbytes
        self._look_ahead()
        return batch

    def _move(self, arrival: _Arrival) -> Any:
        """Return a host batch with what the device has in place of its leaves, and keep it until it may die."""
        moved = dict(zip(map(id, arrival.leaves), arrival.tensors, strict=True))
        batch = map_leaves(lambda leaf: self._on_device(leaf, moved), arrival.host)
        event = arrival.event
        if _has_movers(arrival.host):  # behind what these have started on the consumer's stream
            event = self._device.record_event()
            arrival.event.close()
        self._leaving.append((arrival.host, event))
        return batch

    def _wait_timed(self, event: Event) -> object:
        """Have the consumer wait for `event`, between two marks."""
        before = self._device.mark()
        stream = self._device.wait_event(event)
        after = self._device.mark()
        if before is not None and after is not None:
            self._marks = before, after
        return stream

    def _count_wait(self, before: Mark, after: Mark) -> None:
        if after.query():
            self._marks = None
            self._counters.copy_waits += 1
            self._counters.copy_wait_ns += int(before.elapsed_time(after) * 1e6)

    def _look_ahead(self) -> None:
        """Start the copies of the batches that are there; allocate a destination for the one that is not."""
        arriving = self._arriving
        while len(arriving) < DEPTH and self._error is None and (not arriving or self._has_budget()):
            try:
                found = self._source.try_next()
                if found is None:
                    self._reserve()
                    return
                self._send(found[0])
            except Exception as error:  # noqa: BLE001  raised when its batch is asked for
                self._error = error

    def _raise_error(self) -> None:
        """Raise what was raised in place of the next batch, if anything."""
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # a reference cycle otherwise: error, traceback, this frame

    def _has_budget(self) -> bool:
        """Return whether another batch as large as the one on its way may be copied, too."""
        return 2 * self._arriving[-1].nbytes <= self._budget

    def _reserve(self) -> None:
        if self._reserved is None and self._layout is not None:
            specs = self._layout.specs if type(self._layout) is CopyPlan else self._layout
            self._reserved = self._layout, self._device.allocate(cast(Sequence[TensorSpec], specs))

    def _take_memory(self, layout: Hashable, specs: Sequence[TensorSpec]) -> Memory:
        self._layout = layout
        if self._reserved is not None:
            (reserved_for, memory), self._reserved = self._reserved, None
            if reserved_for == layout:
                return memory
            memory.free.close()
        return self._device.allocate(specs)

    def _send(self, host: Any) -> None:
        leaves: Sequence[torch.Tensor] = ()
        if type(host) is InSlot:
            plan, slot, ring = host
            try:
                found, free, stream = self._take_memory(plan, plan.specs)
            except BaseException:
                ring.release(slot)
                raise
            event = self._device.upload_parts(found, slot.address, plan.parts, free)
            nbytes = plan.nbytes
        else:
            leaves = [leaf for leaf in tensors(host) if _is_copied(leaf)]
            specs = tuple(map(TensorSpec.of, leaves))
            found, free, stream = self._take_memory(specs, specs)
            event = self._device.upload(list(zip(found, leaves, strict=True)), free)
            nbytes = sum(tensor.nbytes for tensor in found)
        self._arriving.append(_Arrival(host, found, stream, leaves, event, self._consumed_of(), nbytes))
        self._counters.uploading_nbytes += nbytes

    def _on_device(self, leaf: Any, moved: dict[int, torch.Tensor]) -> Any:
        """Return what the device has in place of a leaf of the host batch."""
        there = moved.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None
        if there is not None:
            return there
        mover = getattr(leaf, "to", None)
        if callable(mover):
            return mover(self._device.torch_device, non_blocking=True)
        return leaf if isinstance(leaf, _WITHOUT_MEMORY) else self._keep(leaf)

    def _drop_finished(self) -> None:
        """Drop the host batches whose copies are over; wait where too many are pending, as the ring does."""
        leaving = self._leaving
        while leaving:
            event = leaving[0][1]
            if not event.query():
                if len(leaving) <= MOST_PENDING:
                    break
                event.synchronize()
            del leaving[0]
            event.close()


def _is_copied(tensor: torch.Tensor) -> bool:
    """Return whether copying its elements is enough to move `tensor`."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.requires_grad
    )


def _has_movers(batch: Any) -> bool:
    """Return whether some leaf of `batch` moves itself, by a `to` method."""
    found = False

    def visit(leaf: Any) -> Any:
        nonlocal found
        is_copied = isinstance(leaf, torch.Tensor) and _is_copied(leaf)
        found = found or (not is_copied and callable(getattr(leaf, "to", None)))
        return leaf

    map_leaves(visit, batch)
    return found
