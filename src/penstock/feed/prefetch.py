"""From the slot to the device: batches are copied on a side stream while the consumer computes.

When batch k is handed out, the copy of batch k+1 starts, if its host batch is there already. If it is not, only its
destination is allocated (batches mostly look alike): the copy then waits for what the device had been given before
step k, not for step k itself, however late it is started.

A host batch is kept until the event of its copy has passed; then its views die, and its slot is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from penstock.core.tree import map_leaves, tensors
from penstock.device.base import Device, Event, Mould
from penstock.feed.counters import Counters
from penstock.feed.depth import DepthTrial
from penstock.feed.stream_cursor import Used

DEPTH = 2
"""Batches copied ahead of the one in use, at most: one overlaps with the step, another takes up what jitters."""


class HostBatches(Protocol):
    """Where the batches come from; see `EpochRunner` and `InlineRunner`."""

    def next_batch(self) -> Any:
        """Return the next batch; raises StopIteration at the end."""
        ...

    def try_next(self) -> tuple[Any] | None:
        """Return the next batch, in a tuple, if it is there without waiting."""
        ...


@dataclass(slots=True)
class _Arrival:
    """A batch on its way."""

    host: Any
    moved: dict[int, torch.Tensor]
    """The destination of each of its tensors, by the tensor's id."""
    event: Event
    receipt: Sequence[Used]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.moved.values())


@dataclass(slots=True)
class Flight:
    """The copies under way. Knows nothing of where batches come from, so that it can be closed after their loader."""

    device: Device
    arriving: deque[_Arrival] = field(default_factory=deque)
    leaving: deque[tuple[Any, Event]] = field(default_factory=deque)
    """Host batches that were handed out, until their copies are over."""

    def close(self) -> None:
        """Give back what nobody will ask for: its memory may be used again when its copies are over."""
        while self.arriving:
            arrival = self.arriving.popleft()
            self.device.hand_over(arrival.event)
            self.leaving.append((arrival.host, arrival.event))
        while self.leaving:
            self.leaving.popleft()[1].synchronize()


class Prefetcher:
    """Hands out device batches; see the top of this file.

    Args:
        source: gives host batches.
        device: where they go.
        budget_nbytes: the most bytes of device memory that batches under way may take; one is always allowed.
        counters: counts copies, and those that were over before their batch was asked for.
        trial: says how many to copy ahead; `DEPTH` without one.
        receipt_of: returns what the last batch of `source` stands for; `receipt` is then that of the one handed out.
    """

    def __init__(
        self,
        source: HostBatches,
        device: Device,
        *,
        budget_nbytes: int,
        counters: Counters,
        trial: DepthTrial | None = None,
        receipt_of: Callable[[], Sequence[Used]] = tuple,
    ) -> None:
        self._source = source
        self._device = device
        self._budget = budget_nbytes
        self._counters = counters
        self._trial = trial
        if trial is not None:
            trial.pause()
        self.flight = Flight(device)
        self._arriving, self._leaving = self.flight.arriving, self.flight.leaving
        self._error: Exception | None = None
        self._moulds: list[Mould] = []
        self._receipt_of = receipt_of
        self.receipt: Sequence[Used] = ()
        self._reserved: tuple[list[torch.Tensor], Event] | None = None

    def next_batch(self) -> Any:
        """Return the next batch, on the device and ordered on the current stream.

        Raises:
            StopIteration: the epoch is over.
            torch.OutOfMemoryError: the device has no room for the batch.
        """
        with self._device.apart():
            return self._next_batch()

    def try_next(self) -> tuple[Any] | None:
        """Return the next batch, in a tuple, if it is on its way already or there without waiting."""
        if not self._arriving:
            with self._device.apart():
                self._look_ahead()
        if not self._arriving:
            self._raise_error()
            return None
        return (self.next_batch(),)

    def close(self) -> None:
        """End the copies under way; what they bring is nobody's."""
        self._reserved = self._error = None
        with self._device.apart():
            self.flight.close()
        if self._trial is not None:
            self._trial.pause()

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _next_batch(self) -> Any:
        self._let_go()
        if self._trial is not None:
            self._trial.step(lambda: self._device.now().synchronize())
            self._counters.prefetch = self._trial.evidence
        if not self._arriving:
            self._raise_error()
            self._send(self._source.next_batch())
        arrival = self._arriving.popleft()
        self.receipt = arrival.receipt
        self._counters.uploads += 1
        self._counters.uploads_hidden += arrival.event.query()
        self._device.hand_over(arrival.event)
        batch = map_leaves(lambda leaf: self._arrived(leaf, arrival), arrival.host)
        # Behind what `_arrived` may have started on the consumer's stream.
        self._leaving.append((arrival.host, self._device.now() if _has_movers(arrival.host) else arrival.event))
        self._look_ahead()
        self._counters.uploading_nbytes = sum(one.nbytes for one in self._arriving)
        return batch

    def _look_ahead(self) -> None:
        """Start the copies of the batches that are there; see to a destination for the one that is not."""
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
        """Raise what was raised in place of the next batch, if anything was."""
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # else its traceback would keep this frame, and this frame the error

    def _has_budget(self) -> bool:
        under_way = [arrival.nbytes for arrival in self._arriving]
        return not under_way or sum(under_way) + max(under_way) <= self._budget

    def _reserve(self) -> None:
        if self._reserved is None and self._moulds:
            self._reserved = self._allocate(self._moulds)

    def _allocate(self, moulds: list[Mould]) -> tuple[list[torch.Tensor], Event]:
        """Return memory, and the event behind all that may still use it."""
        return [self._device.empty(mould) for mould in moulds], self._device.now()

    def _send(self, host: Any) -> None:
        leaves = [leaf for leaf in tensors(host) if _is_copied(leaf)]
        moulds = [Mould.of(leaf) for leaf in leaves]
        fits = self._reserved is not None and moulds == self._moulds
        memory, after = self._reserved if self._reserved is not None and fits else self._allocate(moulds)
        self._reserved, self._moulds = None, moulds
        event = self._device.upload(list(zip(memory, leaves, strict=True)), after)
        moved = dict(zip(map(id, leaves), memory, strict=True))
        self._arriving.append(_Arrival(host, moved, event, self._receipt_of()))

    def _arrived(self, leaf: Any, arrival: _Arrival) -> Any:
        """Return what the device has in place of a leaf of the host batch."""
        moved = arrival.moved.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None
        if moved is not None:
            return moved
        mover = getattr(leaf, "to", None)
        return mover(self._device.torch_device, non_blocking=True) if callable(mover) else leaf

    def _let_go(self) -> None:
        while self._leaving and self._leaving[0][1].query():
            self._leaving.popleft()


def _is_copied(tensor: torch.Tensor) -> bool:
    """Return whether a copy of its elements is all there is to moving `tensor`."""
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

    def look(leaf: Any) -> Any:
        nonlocal found
        is_copied = isinstance(leaf, torch.Tensor) and _is_copied(leaf)
        found = found or (not is_copied and callable(getattr(leaf, "to", None)))
        return leaf

    map_leaves(look, batch)
    return found
