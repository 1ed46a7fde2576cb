"""Batch inference: batches are copied in ahead of the model, and outputs back behind it, in order."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from penstock.core.errors import OptionError
from penstock.core.host import available_nbytes
from penstock.core.shared_segment import PrivateSegment
from penstock.core.tree import call_with, map_leaves, tensors
from penstock.device import Device, Event, device_of
from penstock.device.base import CompletedEvent
from penstock.inference.live_source import LiveBatches
from penstock.loader.counters import Counters
from penstock.loader.dataloader import DataLoader, config_of
from penstock.loader.to_device.prefetch import BatchSource, Prefetcher
from penstock.loader.transport.arena import ALIGNMENT, Arena
from penstock.loader.transport.ring import Ring, Slot
from penstock.memory.eval_step import EvalStep

_MAX_IN_FLIGHT = 2
"""Outputs that may be on their way to the host while the model continues."""


def infer(
    model: Callable[..., Any],
    source: Iterable[Any],
    *,
    forward: Callable[[Any, Any], Any] | None = None,
    device: str | torch.device | Device | None = None,
    batch_size: int | None = None,
    max_latency_s: float | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> Iterator[Any]:
    """Yield `model`'s outputs for the batches of `source`, in order, on the host, computed under `torch.no_grad`.

    The next batch is copied to the device while the model computes, and the last output is copied back meanwhile. An
    output is complete when it is yielded, and stays as it is for as long as it is kept. The model is used as it is:
    call `model.eval()` first where that matters.

    Args:
        model: called as `model(batch)` for a tensor, `model(*batch)` for a tuple or list, `model(**batch)` for a dict;
            or a `penstock.EvalStep`, which survives when memory runs out.
        source: a DataLoader or any iterable of batches; with `batch_size`, an iterable of samples, which may block
            (a camera, a queue): a thread reads it.
        forward: called as `forward(model, batch)` instead, say to leave out the labels:
            `lambda model, batch: model(batch[0])`.
        device: where the model is; by default where its first parameter is.
        batch_size: the number of samples of `source` in a batch.
        max_latency_s: with `batch_size`, the longest in seconds that a sample waits for others to fill its batch.
        collate_fn: with `batch_size`, makes a batch of a list of samples; `default_collate` by default.

    Raises:
        OptionError: `max_latency_s` or `collate_fn` without `batch_size`, or no such device.

    Example:
        >>> import torch, penstock
        >>> loader = penstock.DataLoader(torch.arange(6.0), batch_size=4)
        >>> [out.tolist() for out in penstock.infer(torch.neg, loader)]
        [[-0.0, -1.0, -2.0, -3.0], [-4.0, -5.0]]
    """
    if batch_size is None and (max_latency_s is not None or collate_fn is not None):
        raise OptionError("max_latency_s and collate_fn are for a source of samples; pass batch_size as well")
    return _infer(
        forward or _call, model, source, _device(device, model, source), batch_size, max_latency_s, collate_fn
    )


def _infer(
    forward: Callable[[Any, Any], Any],
    model: Any,
    source: Iterable[Any],
    device: Device,
    batch_size: int | None,
    max_latency_s: float | None,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> Iterator[Any]:
    batches: _Batches | LiveBatches = (
        _Batches(source) if batch_size is None else LiveBatches(source, batch_size, max_latency_s, collate_fn)
    )
    is_on_device = isinstance(source, DataLoader) and config_of(source).arrives_on_device
    ahead: BatchSource = batches
    if not (device.is_host or is_on_device):
        ahead = Prefetcher(batches, device, budget_nbytes=1 << 30, counters=Counters())
    results = _Results(device)
    ended: Any = None
    failed: Exception | None = None
    try:
        while True:
            try:
                found = _next(ahead, batches, wait=not results.in_flight)
            except Exception as error:  # noqa: BLE001  raised after the outputs before it
                ended = error
                break
            if found is None:  # nothing to compute at the moment: yield what is ready
                yield results.take()
                continue
            try:
                with torch.no_grad():
                    results.send(forward(model, found[0]))
            except Exception as error:  # noqa: BLE001  likewise
                failed, found = error, None
                break
            del found
            while results.in_flight >= _MAX_IN_FLIGHT:
                yield results.take()
        while results.in_flight:
            yield results.take(failed)
        if failed is not None:
            raise failed
        if not isinstance(ended, StopIteration):
            raise ended
    finally:
        ended = failed = None
        if ahead is not batches:
            ahead.close()
        batches.close()
        results.close()


def _next(ahead: Any, batches: Any, *, wait: bool) -> tuple[Any] | None:
    """Return the next batch in a tuple, None when there is none yet and `wait` is false; raises at the end."""
    if wait or not isinstance(batches, LiveBatches):
        return (ahead.next_batch(),)
    found: tuple[Any] | None = ahead.try_next()
    return found


def _call(model: Any, batch: Any) -> Any:
    return model(batch) if isinstance(model, EvalStep) else call_with(model, batch)


def _device(wanted: Any, model: Any, source: Any) -> Device:
    if wanted is not None:
        return device_of(wanted)
    if isinstance(source, DataLoader) and (device := config_of(source).device) is not None:
        return device
    parameters = getattr(model.model if isinstance(model, EvalStep) else model, "parameters", None)
    first = next(iter(parameters()), None) if callable(parameters) else None
    return device_of(first.device if first is not None else "cpu")


class _Batches:
    """Batches of any iterable."""

    def __init__(self, source: Iterable[Any]) -> None:
        self._iterator: Any = iter(source)

    def next_batch(self) -> Any:
        return next(self._iterator)

    def try_next(self) -> tuple[Any] | None:
        return None

    def close(self) -> None:
        self._iterator = None


@dataclass(slots=True)
class _Result:
    on_device: Any
    """The output on the device, kept until its copy is over."""
    on_host: Any
    event: Event


class _Results:
    """Outputs on their way to the host, into slots that are reused when their outputs are dropped."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # The user may copy an output to the device again and drop it: only a fence shows when that copy is over.
        pin, fence = (device.register, device.fence) if device.has_fence else (None, None)
        self._ring = Ring(PrivateSegment, max(64 << 20, available_nbytes() // 8), pin=pin, fence=fence)
        self._in_flight: deque[_Result] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def send(self, output: Any) -> None:
        """Start the copy of an output."""
        if self._device.is_host:
            if any(
                _is_elsewhere(tensor) for tensor in tensors(output)
            ):  # of a function that takes batches there itself
                output = map_leaves(_to_host, output)
            self._in_flight.append(_Result(None, output, CompletedEvent()))
            return
        leaves = {id(tensor): tensor.contiguous() for tensor in tensors(output) if self._is_copied(tensor)}
        arena, slot = self._take_arena(sum(tensor.nbytes + ALIGNMENT for tensor in leaves.values()))
        destinations = {key: arena.tensor(tuple(tensor.shape), tensor.dtype) for key, tensor in leaves.items()}
        if slot is not None:
            self._ring.note(slot, arena.used)
        with self._device.outside_capture():
            event = self._device.download([(destinations[key], tensor) for key, tensor in leaves.items()])
        on_host = map_leaves(
            lambda leaf: destinations[id(leaf)] if id(leaf) in destinations else _to_host(leaf), output
        )
        self._in_flight.append(_Result((output, leaves), on_host, event))

    def take(self, failed: Exception | None = None) -> Any:
        """Return the oldest output; waits for its copy. After an error that broke the device, that one is raised."""
        result = self._in_flight.popleft()
        try:
            result.event.synchronize()
            result.event.close()
        except torch.AcceleratorError as error:
            raise (failed or error) from None
        return result.on_host

    def close(self) -> None:
        try:
            with contextlib.suppress(torch.AcceleratorError):  # the device is broken, and the program has the error
                while self._in_flight:
                    self._in_flight.popleft().event.synchronize()
        finally:
            self._in_flight.clear()
            self._ring.close()

    def _is_copied(self, tensor: torch.Tensor) -> bool:
        """Return whether the device's copies are ordered behind what computes `tensor`: on another GPU they are not."""
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
        return is_plain and (tensor.is_cpu or tensor.device == self._device.torch_device)

    def _take_arena(self, nbytes: int) -> tuple[Arena, Slot | None]:
        slot = self._ring.acquire_larger(nbytes) if nbytes else None
        if slot is None:  # nothing to copy, or the user keeps all that the budget allows
            return Arena(torch.empty(nbytes, dtype=torch.uint8).numpy()), None
        self._ring.commit(slot, 0)
        return Arena(self._ring.lend(slot)), slot


def _is_elsewhere(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def _to_host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf
