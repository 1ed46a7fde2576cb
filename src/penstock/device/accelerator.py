"""Any accelerator of torch's, by what torch offers for all of them: streams, events, its caching allocator.

Where a backend has no streams (MPS), copies are made at once, as on the host.
"""

from __future__ import annotations

import contextlib

import torch

from penstock.device.base import Copies, Event, Mould, Passed, Registration


class Accelerator:
    """Two streams beside the consumer's, one for each direction; see `base.Device`.

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

    def apart(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that changes nothing: torch has no graphs for accelerators in general."""
        return contextlib.nullcontext()

    def empty(self, mould: Mould) -> torch.Tensor:
        """Return memory from torch's caching allocator, on the current stream."""
        return torch.empty_strided(mould.size, mould.stride, dtype=mould.dtype, device=self.torch_device)

    def now(self) -> Event:
        """Return an event on the current stream."""
        if self._up is None:
            return Passed()
        event: Event = torch.accelerator.current_stream(self.torch_device).record_event()
        return event

    def upload(self, copies: Copies, after: Event) -> Event:
        """Copy on the upward stream."""
        return self._copy(copies, after, self._up)

    def download(self, copies: Copies) -> Event:
        """Copy on the downward stream, so that results do not queue behind batches."""
        return self._copy(copies, self.now(), self._down)

    def hand_over(self, event: Event) -> None:
        """Have the current stream wait."""
        if isinstance(event, torch.Event):
            torch.accelerator.current_stream(self.torch_device).wait_event(event)
        else:
            event.synchronize()

    def register(self, memory: memoryview) -> Registration | None:
        """Refuse: torch has no way to page-lock memory that exists for accelerators in general."""
        return None

    def fence(self) -> Event | None:
        """Refuse: there is no event for all streams at once."""
        return None

    def _copy(self, copies: Copies, after: Event, stream: torch.Stream | None) -> Event:
        if stream is None:
            for destination, source in copies:
                destination.copy_(source)
            return Passed()
        with stream:
            if isinstance(after, torch.Event):
                stream.wait_event(after)
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)
            done: Event = stream.record_event()
        return done


def free_and_total_nbytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of an accelerator's memory that are free for this process, and all that it may take.

    Both know the share that `set_per_process_memory_fraction` leaves it.
    """
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    share = (
        module.get_per_process_memory_fraction(device) if hasattr(module, "get_per_process_memory_fraction") else 1.0
    )
    limit = int(share * total)
    return max(0, min(int(free), limit - int(torch.accelerator.memory_reserved(device)))), min(int(total), limit)


def _stream(device: torch.device) -> torch.Stream | None:
    try:
        return torch.Stream(device)
    except (RuntimeError, NotImplementedError):  # a backend without streams
        return None
