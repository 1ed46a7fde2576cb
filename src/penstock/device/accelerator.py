"""Accelerator: any accelerator of torch, by the streams, events and caching allocator that torch has for all of them.

On a backend without streams (MPS), a copy blocks until it is done, as on the host.
"""

from __future__ import annotations

import contextlib

import torch

from penstock.device.base import CompletedEvent, CopyPairs, Event, Registration, TensorSpec


class Accelerator:
    """A device with two streams beside the consumer's, one for each direction; see `base.Device`.

    Args:
        device: with its index.
    """

    is_host = False
    has_fence = False
    numa_node: int | None = None

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self.name = str(self.torch_device)
        self._up = _stream(self.torch_device)
        self._down = _stream(self.torch_device)

    def outside_capture(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that does nothing: torch has no graph capture for accelerators in general."""
        return contextlib.nullcontext()

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Return memory from torch's caching allocator, on the current stream."""
        return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=self.torch_device)

    def record_event(self) -> Event:
        """Return an event on the current stream."""
        if self._up is None:
            return CompletedEvent()
        event: Event = torch.accelerator.current_stream(self.torch_device).record_event()
        return event

    def upload(self, copies: CopyPairs, after: Event) -> Event:
        """Copy on the upload stream."""
        return self._copy(copies, after, self._up)

    def download(self, copies: CopyPairs) -> Event:
        """Copy on the download stream, so that results do not queue behind batches."""
        return self._copy(copies, self.record_event(), self._down)

    def wait_event(self, event: Event) -> None:
        """Make the current stream wait."""
        if isinstance(event, torch.Event):
            torch.accelerator.current_stream(self.torch_device).wait_event(event)
        else:
            event.synchronize()

    def register(self, memory: memoryview) -> Registration | None:
        """Return None: torch cannot page-lock existing memory for accelerators in general."""
        return None

    def fence(self) -> Event | None:
        """Return None: torch has no event for all streams at once."""
        return None

    def _copy(self, copies: CopyPairs, after: Event, stream: torch.Stream | None) -> Event:
        if stream is None:
            for destination, source in copies:
                destination.copy_(source)
            return CompletedEvent()
        with stream:
            if isinstance(after, torch.Event):
                stream.wait_event(after)
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)
            done: Event = stream.record_event()
        return done


def free_and_total_nbytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of an accelerator's memory that are free for this process, and its total.

    Both respect the limit of `set_per_process_memory_fraction`.
    """
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    fraction = (
        module.get_per_process_memory_fraction(device) if hasattr(module, "get_per_process_memory_fraction") else 1.0
    )
    limit = int(fraction * total)
    return max(0, min(int(free), limit - int(torch.accelerator.memory_reserved(device)))), min(int(total), limit)


def _stream(device: torch.device) -> torch.Stream | None:
    try:
        return torch.Stream(device)
    except (RuntimeError, NotImplementedError):  # a backend without streams
        return None
