"""The host as a device: batches are where they should be already."""

from __future__ import annotations

import contextlib

import torch

from penstock.device.base import Copies, Event, Mould, Passed, Registration


class Cpu:
    """Copies at once, and page-locks nothing; see `base.Device`."""

    name = "cpu"
    torch_device = torch.device("cpu")
    is_host = True
    has_fence = True
    numa_node: int | None = None

    def apart(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that changes nothing: nothing is captured here."""
        return contextlib.nullcontext()

    def empty(self, mould: Mould) -> torch.Tensor:
        """Return uninitialised memory."""
        return torch.empty_strided(mould.size, mould.stride, dtype=mould.dtype)

    def now(self) -> Event:
        """Return an event that has passed."""
        return Passed()

    def upload(self, copies: Copies, after: Event) -> Event:
        """Copy at once."""
        after.synchronize()
        for destination, source in copies:
            destination.copy_(source)
        return Passed()

    def hand_over(self, event: Event) -> None:
        """Wait."""
        event.synchronize()

    def download(self, copies: Copies) -> Event:
        """Copy at once."""
        return self.upload(copies, Passed())

    def register(self, memory: memoryview) -> Registration | None:
        """Refuse: nothing reads host memory behind the processor's back."""
        return None

    def fence(self) -> Event:
        """Return an event that has passed."""
        return Passed()
