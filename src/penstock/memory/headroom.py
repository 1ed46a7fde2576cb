"""Headroom: how many samples have room now, judged by what earlier micro-batches took.

Asked before a step whose out-of-memory is dear: ranks of a sharded model then agree on a size that all have room for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from penstock.device.accelerator import free_and_total_nbytes


class Meter(Protocol):
    """Reads a device's memory, in bytes. Called by the thread that trains, around each micro-batch."""

    def held(self) -> int:
        """Return what tensors hold now."""
        ...

    def peak(self) -> int:
        """Return the most that they ever held."""
        ...

    def free(self) -> int:
        """Return what further tensors could have."""
        ...


class AllocatorMeter:
    """Reads torch's caching allocator of one accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def held(self) -> int:
        """Return what tensors hold now."""
        return int(torch.accelerator.memory_allocated(self._device))

    def peak(self) -> int:
        """Return the most that they ever held, or since somebody reset that."""
        return int(torch.accelerator.max_memory_allocated(self._device))

    def free(self) -> int:
        """Return what the device has left, and what the allocator keeps unused."""
        cached = int(torch.accelerator.memory_reserved(self._device)) - self.held()
        return free_and_total_nbytes(self._device)[0] + cached


class Headroom:
    """Remembers what the largest micro-batches took, by bucket.

    Args:
        meter: of the device; None where memory is not watched (the host's).
    """

    def __init__(self, meter: Meter | None) -> None:
        self._meter = meter
        self._taken: dict[tuple[Any, ...], tuple[int, int]] = {}
        """Samples, and the bytes that they took on top of what was held before."""

    @contextmanager
    def measuring(self, bucket: tuple[Any, ...], samples: int) -> Iterator[None]:
        """Learn from a micro-batch that goes through inside, if it takes more than was ever held."""
        if self._meter is None:
            yield
            return
        held, peak = self._meter.held(), self._meter.peak()
        yield
        highest = self._meter.peak()
        if highest > peak:
            self._taken[bucket] = samples, highest - held

    def most(self, bucket: tuple[Any, ...]) -> float:
        """Return how many samples of a bucket have room now; infinite where nothing says that they have not."""
        if self._meter is None or bucket not in self._taken:
            return float("inf")
        samples, taken = self._taken[bucket]
        free = self._meter.free()
        return float("inf") if taken <= free else max(1, samples * free // taken)


def headroom_of(devices: list[torch.device]) -> Headroom:
    """Return the headroom of a model on these accelerators: of the first, where there is any."""
    return Headroom(AllocatorMeter(devices[0]) if devices else None)
