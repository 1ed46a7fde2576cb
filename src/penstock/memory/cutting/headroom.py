"""Headroom: how many samples have room now, estimated from what earlier micro-batches took.

Used where an out-of-memory is expensive: ranks of a sharded model agree beforehand on a size that all have room for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from penstock.device.accelerator import free_and_total_nbytes


class MemoryMeter(Protocol):
    """Reads the memory of a device. The thread that trains calls it before and after each micro-batch.

    No method may fail; none has side effects.
    """

    def allocated_nbytes(self) -> int:
        """Return the bytes that tensors hold now."""
        ...

    def peak_nbytes(self) -> int:
        """Return the most bytes that they ever held."""
        ...

    def free_nbytes(self) -> int:
        """Return the bytes that further tensors could have."""
        ...


class AllocatorMeter:
    """Reads torch's caching allocator of one accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated_nbytes(self) -> int:
        """Return the bytes that tensors hold now."""
        return int(torch.accelerator.memory_allocated(self._device))

    def peak_nbytes(self) -> int:
        """Return the most bytes that they ever held, or since the last reset."""
        return int(torch.accelerator.max_memory_allocated(self._device))

    def free_nbytes(self) -> int:
        """Return what the device has free, and what the allocator caches."""
        cached = int(torch.accelerator.memory_reserved(self._device)) - self.allocated_nbytes()
        return free_and_total_nbytes(self._device)[0] + cached


class Headroom:
    """The bytes that the largest micro-batches took, by bucket (`split.bucket_of`).

    Args:
        meter: of the device; None for the host, whose memory is not measured.
    """

    def __init__(self, meter: MemoryMeter | None) -> None:
        self._meter = meter
        self._taken: dict[tuple[Any, ...], tuple[int, int]] = {}
        """Samples, and the bytes that they took on top of what was allocated before."""

    @contextmanager
    def measure(self, bucket: tuple[Any, ...], samples: int) -> Iterator[None]:
        """Measure a micro-batch that runs inside, if it raises the peak: only then does the peak show what it took."""
        if self._meter is None:
            yield
            return
        held, peak = self._meter.allocated_nbytes(), self._meter.peak_nbytes()
        yield
        highest = self._meter.peak_nbytes()
        if highest > peak:
            self._taken[bucket] = samples, highest - held

    def max_samples(self, bucket: tuple[Any, ...]) -> float:
        """Return how many samples of a bucket have room now; infinite where nothing has been measured or all fits."""
        if self._meter is None or bucket not in self._taken:
            return float("inf")
        samples, taken = self._taken[bucket]
        free = self._meter.free_nbytes()
        return float("inf") if taken <= free else max(1, samples * free // taken)


def headroom_of(devices: list[torch.device]) -> Headroom:
    """Return the headroom of a model on these accelerators: of the first, if there is one."""
    return Headroom(AllocatorMeter(devices[0]) if devices else None)
