"""Cpu: the host as a device, where batches are already."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

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


class Cpu:
    """Copies synchronously, and page-locks nothing; see `base.Device`."""

    name = "cpu"
    torch_device = torch.device("cpu")
    is_host = True
    has_fence = True
    can_register = True

    def outside_capture(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that does nothing: there is no graph capture on the host."""
        return contextlib.nullcontext()

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Return uninitialised memory."""
        return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype)

    def allocate(self, specs: Sequence[TensorSpec]) -> Memory:
        """Return memory for several tensors."""
        return allocated(self, specs)

    def current_stream(self) -> None:
        """Return None: the host has one."""

    def record_use(self, tensor: torch.Tensor) -> None:
        """Do nothing: what uses it has returned."""

    def record_event(self) -> Event:
        """Return an event that has passed."""
        return CompletedEvent()

    def upload(self, copies: CopyPairs, after: Event) -> Event:
        """Copy before returning."""
        after.synchronize()
        for destination, source in copies:
            destination.copy_(source)
        return CompletedEvent()

    def upload_parts(self, tensors: Sequence[torch.Tensor], address: int, parts: Parts, after: Event) -> Event:
        """Copy before returning."""
        return self.upload([*zip(tensors, host_parts(tensors, address, parts), strict=True)], after)

    def mark(self) -> None:
        """Return None: nothing is waited for."""

    def wait_event(self, event: Event) -> None:
        """Wait."""
        event.synchronize()

    def download(self, copies: CopyPairs) -> Event:
        """Copy before returning."""
        return self.upload(copies, CompletedEvent())

    def register(self, memory: memoryview) -> Registration | None:
        """Return None: no device reads this memory."""
        return None

    def fence(self) -> Event:
        """Return an event that has passed."""
        return CompletedEvent()
