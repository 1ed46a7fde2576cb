"""Accelerator: any accelerator of torch, by the streams, events and caching allocator that torch has for all of them.

On a backend without streams (MPS), a copy blocks until it is done, as on the host.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from penstock.core.errors import OptionError
from penstock.device.base import (
    CompletedEvent,
    CopyPairs,
    Event,
    Memory,
    Parts,
    Registration,
    TensorSpec,
    allocated,
    host_parts,
)

STAGED_NBYTES = 64 << 10
"""Smaller copies from pageable memory are staged by the driver (CUDA driver API, "API synchronization behavior")."""


class TorchEvent:
    """An event of torch; see `base.Event`."""

    __slots__ = ("event",)

    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def query(self) -> bool:
        """Return whether it has passed."""
        return bool(self.event.query())

    def synchronize(self) -> None:
        """Wait until it has passed."""
        self.event.synchronize()

    def close(self) -> None:
        """Do nothing: torch keeps its events for use again."""


class Accelerator:
    """A device with two streams beside the consumer's, one for each direction; see `base.Device`.

    Args:
        device: with its index.
    """

    is_host = False
    has_fence = False
    can_register = False

    def __init__(self, device: torch.device) -> None:
        _leave_garbage()
        self.torch_device = device
        self.name = str(self.torch_device)
        self._up = self._new_stream()
        self._down = self._new_stream()

    def outside_capture(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that does nothing: torch has no graph capture for accelerators in general."""
        return contextlib.nullcontext()

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Return memory from torch's caching allocator, on the current stream."""
        return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=self.torch_device)

    def allocate(self, specs: Sequence[TensorSpec]) -> Memory:
        """Return memory for several tensors."""
        return allocated(self, specs)

    def current_stream(self) -> object:
        """Return torch's current stream of this device in this thread."""
        return None if self._up is None else torch.accelerator.current_stream(self.torch_device)

    def record_use(self, tensor: torch.Tensor) -> None:
        """Have torch's allocator wait for the current stream before it reuses the memory."""
        tensor.record_stream(torch.accelerator.current_stream(self.torch_device))

    def record_event(self) -> Event:
        """Return an event on the current stream."""
        if self._up is None:
            return CompletedEvent()
        return TorchEvent(torch.accelerator.current_stream(self.torch_device).record_event())

    def mark(self) -> torch.Event | None:
        """Return an event of torch with a time, on the current stream; None on a backend that has none."""
        if self._up is None:
            return None
        try:
            event = torch.Event(self.torch_device, enable_timing=True)
            event.record(torch.accelerator.current_stream(self.torch_device))
        except (RuntimeError, NotImplementedError):
            return None
        return event

    def upload(self, copies: CopyPairs, after: Event) -> Event:
        """Copy on the upload stream, by way of torch's pinned memory from what is not page-locked."""
        if self._up is not None:
            copies = [(destination, self._page_locked(source)) for destination, source in copies]
        return self._copy(copies, after, self._up)

    def upload_parts(self, tensors: Sequence[torch.Tensor], address: int, parts: Parts, after: Event) -> Event:
        """Copy on the upload stream."""
        return self.upload([*zip(tensors, host_parts(tensors, address, parts), strict=True)], after)

    def download(self, copies: CopyPairs) -> Event:
        """Copy on the download stream, so that results do not queue behind batches."""
        return self._copy(copies, self.record_event(), self._down)

    def wait_event(self, event: Event) -> object:
        """Make the current stream wait."""
        stream = self.current_stream()
        if isinstance(event, TorchEvent):
            torch.accelerator.current_stream(self.torch_device).wait_event(event.event)
        else:
            event.synchronize()
        return stream

    def register(self, memory: memoryview) -> Registration | None:
        """Return None: torch cannot page-lock existing memory for accelerators in general."""
        return None

    def fence(self) -> Event | None:
        """Return None: torch has no event for all streams at once."""
        return None

    def _page_locked(self, source: torch.Tensor) -> torch.Tensor:
        """Return `source` in page-locked memory, of which torch's allocator knows when its copy is over."""
        if source.nbytes < STAGED_NBYTES or source.is_pinned():
            return source
        try:
            return torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, pin_memory=True).copy_(
                source
            )
        except RuntimeError:  # there is no more of it, or the backend has none
            return source

    def _copy(self, copies: CopyPairs, after: Event, stream: torch.Stream | None) -> Event:
        if stream is None:
            for destination, source in copies:
                destination.copy_(source)
            return CompletedEvent()
        with self._on(stream):
            if isinstance(after, TorchEvent):
                stream.wait_event(after.event)
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)
            return TorchEvent(stream.record_event())

    def _new_stream(self) -> torch.Stream | None:
        try:
            return torch.Stream(self.torch_device)
        except (RuntimeError, NotImplementedError):  # a backend without streams
            return None

    @contextlib.contextmanager
    def _on(self, stream: torch.Stream) -> Iterator[None]:
        """Make a stream current for a block.

        `with stream:` keeps what was current before on the stream, which threads share.
        """
        index, before = torch.accelerator.current_device_index(), torch.accelerator.current_stream(self.torch_device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(index)


@functools.cache
def _leave_garbage() -> None:
    """Have forked children never collect the garbage that their parent left: streams, copies under way, loaders.

    A torch.Event that dies in a forked child aborts it: its destructor selects the device, which fails there.
    """
    if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
        os.register_at_fork(after_in_child=gc.freeze)


def free_and_total_nbytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of an accelerator's memory that are free for this process, and its total.

    Both respect the limit of `set_per_process_memory_fraction`.
    """
    module = torch.get_device_module(device)
    free, total = _memory_info(module)(device)
    fraction = (
        module.get_per_process_memory_fraction(device) if hasattr(module, "get_per_process_memory_fraction") else 1.0
    )
    limit = int(fraction * total)
    return max(0, min(int(free), limit - int(torch.accelerator.memory_reserved(device)))), min(int(total), limit)


def _memory_info(module: Any) -> Callable[[torch.device], tuple[int, int]]:
    """Return the function for an accelerator's free and total bytes: the backend's own, else that of torch 2.10."""
    of_all = getattr(torch.accelerator, "get_memory_info", None)
    found: Callable[[torch.device], tuple[int, int]] | None = getattr(module, "mem_get_info", of_all)
    if found is None:
        raise OptionError(
            f"{module.__name__} does not tell how much memory its device has, and torch {torch.__version__} has no "
            "torch.accelerator.get_memory_info; pass a budget, or use torch 2.10 or later"
        )
    return found
