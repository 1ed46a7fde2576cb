"""Copies batches from their slots to the device, on a side stream, while the consumer computes.

When batch k is handed out, the copy of batch k+1 starts, if its host batch is there already. If it is not, only its
destination is allocated (batches mostly have the same shapes): the copy then waits for what the device had been given
before step k, not for step k itself, however late it starts.

A host batch is kept until the event of its copy has passed; then its views die, and its slot is free.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from penstock.core.tree import map_leaves, tensors
from penstock.device.base import Device, Event, TensorSpec
from penstock.device.oom import is_out_of_memory
from penstock.loader.counters import Counters
from penstock.loader.sampling.stream_cursor import Consumed
from penstock.loader.to_device.prefetch_depth import DepthTrial

_WHOSE_ERROR = (
    "It was reported while penstock asked for a copy, which runs no kernel: what failed was started by the program "
    "before. CUDA_LAUNCH_BLOCKING=1 shows where. After it this process can use the device no more."
)

_WITHOUT_MEMORY = (str, bytes, int, float, complex, np.generic, type(None))

DEPTH = 2
"""Batches copied ahead of the one in use, at most: one overlaps with the step, another absorbs jitter."""


class HostBatches(Protocol):
    """Where the batches come from; see `Scheduler` and `InlineScheduler`.

    The prefetcher calls both methods, in the thread that iterates.
    """

    def next_batch(self) -> Any:
        """Return the next batch; raises StopIteration at the end."""
        ...

    def try_next(self) -> tuple[Any] | None:
        """Return the next batch, in a tuple, if there is one without waiting."""
        ...


class _Memory(NamedTuple):
    """Where a batch will be on the device."""

    tensors: list[torch.Tensor]
    free: Event
    """Behind everything that may still use it."""
    stream: object
    """The consumer's, that it was allocated on."""


@dataclass(slots=True)
class _Arrival:
    """A batch whose copy is under way."""

    host: Any
    moved: dict[int, torch.Tensor]
    """The destination of each of its tensors, by the tensor's id."""
    event: Event
    stream: object
    """The consumer's stream that the destinations were allocated on."""
    consumed: Sequence[Consumed]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.moved.values())


@dataclass(slots=True)
class InFlightCopies:
    """The copies under way. It has no reference to the source of batches, so that it can outlive the loader."""

    device: Device
    arriving: deque[_Arrival] = field(default_factory=deque)
    leaving: deque[tuple[Any, Event]] = field(default_factory=deque)
    """Host batches that were handed out, until their copies are over."""

    def close(self) -> None:
        """Drop what will not be asked for; waits for its copies, so that the memory may be reused."""
        # After an error that breaks the device nothing runs there any more, and the program has had the error.
        with contextlib.suppress(torch.AcceleratorError), self.device.outside_capture():
            for event in [*(arrival.event for arrival in self.arriving), *(event for _, event in self.leaving)]:
                event.synchronize()
        self.arriving.clear()
        self.leaving.clear()


class Prefetcher:
    """Hands out batches on the device.

    Args:
        source: gives host batches.
        device: where they go.
        budget_nbytes: the most bytes of device memory that batches under way may take; one is always allowed.
        counters: counts copies, and those that were over before their batch was asked for.
        trial: decides how many to copy ahead; `DEPTH` without one.
        keep: called with each leaf that stays on the host and may hold memory (an array, an object of a class of the
            user's), which the user may copy from; returns what to hand out in its place.
        consumed_of: returns what the last batch of `source` consumed; `consumed` is then that of the one handed out.
    """

    def __init__(
        self,
        source: HostBatches,
        device: Device,
        *,
        budget_nbytes: int,
        counters: Counters,
        trial: DepthTrial | None = None,
        keep: Callable[[Any], Any] = lambda leaf: leaf,
        consumed_of: Callable[[], Sequence[Consumed]] = tuple,
    ) -> None:
        self._source = source
        self._device = device
        self._budget = budget_nbytes
        self._counters = counters
        self._trial = trial
        self._keep = keep
        if trial is not None:
            trial.pause()
        self.in_flight = InFlightCopies(device)
        self._arriving, self._leaving = self.in_flight.arriving, self.in_flight.leaving
        self._error: Exception | None = None
        self._tensor_specs: list[TensorSpec] = []
        self._consumed_of = consumed_of
        self.consumed: Sequence[Consumed] = ()
        self._reserved: _Memory | None = None

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

    def close(self) -> None:
        """End the copies under way, and drop their batches."""
        self._reserved = self._error = None
        self.in_flight.close()
        if self._trial is not None:
            self._trial.pause()

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _next_batch(self) -> Any:
        self._drop_finished()
        if self._trial is not None:
            self._trial.step(lambda: self._device.record_event().synchronize())
            self._counters.prefetch = self._trial.summary
        if not self._arriving:
            self._raise_error()
            self._send(self._source.next_batch())
        arrival = self._arriving.popleft()
        self.consumed = arrival.consumed
        self._counters.uploads += 1
        self._counters.uploads_hidden += arrival.event.query()
        self._device.wait_event(arrival.event)
        if arrival.stream != self._device.current_stream():
            for tensor in arrival.moved.values():
                self._device.record_use(tensor)
        batch = map_leaves(lambda leaf: self._on_device(leaf, arrival), arrival.host)
        # Behind what `_on_device` may have started on the consumer's stream.
        self._leaving.append(
            (arrival.host, self._device.record_event() if _has_movers(arrival.host) else arrival.event)
        )
        self._look_ahead()
        self._counters.uploading_nbytes = sum(one.nbytes for one in self._arriving)
        return batch

    def _look_ahead(self) -> None:
        """Start the copies of the batches that are there; allocate a destination for the one that is not."""
        depth = DEPTH if self._trial is None else self._trial.depth
        while self._error is None and len(self._arriving) < depth and self._has_budget():
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
        under_way = [arrival.nbytes for arrival in self._arriving]
        return not under_way or sum(under_way) + max(under_way) <= self._budget

    def _reserve(self) -> None:
        if self._reserved is None and self._tensor_specs:
            self._reserved = self._allocate(self._tensor_specs)

    def _allocate(self, tensor_specs: list[TensorSpec]) -> _Memory:
        tensors = [self._device.empty(tensor_spec) for tensor_spec in tensor_specs]
        return _Memory(tensors, self._device.record_event(), self._device.current_stream())

    def _send(self, host: Any) -> None:
        leaves = [leaf for leaf in tensors(host) if _is_copied(leaf)]
        tensor_specs = [TensorSpec.of(leaf) for leaf in leaves]
        fits = self._reserved is not None and tensor_specs == self._tensor_specs
        memory = self._reserved if self._reserved is not None and fits else self._allocate(tensor_specs)
        self._reserved, self._tensor_specs = None, tensor_specs
        event = self._device.upload(list(zip(memory.tensors, leaves, strict=True)), memory.free)
        moved = dict(zip(map(id, leaves), memory.tensors, strict=True))
        self._arriving.append(_Arrival(host, moved, event, memory.stream, self._consumed_of()))

    def _on_device(self, leaf: Any, arrival: _Arrival) -> Any:
        """Return what the device has in place of a leaf of the host batch."""
        moved = arrival.moved.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None
        if moved is not None:
            return moved
        mover = getattr(leaf, "to", None)
        if callable(mover):
            return mover(self._device.torch_device, non_blocking=True)
        return leaf if isinstance(leaf, _WITHOUT_MEMORY) else self._keep(leaf)

    def _drop_finished(self) -> None:
        while self._leaving and self._leaving[0][1].query():
            self._leaving.popleft()


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
