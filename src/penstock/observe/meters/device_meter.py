"""Measures the accelerator memory that this process uses, and the accelerators' utilization.

Reads nothing before the program has imported torch and initialized an accelerator. The meter must never initialize one:
a process with a CUDA context cannot fork workers that use CUDA.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from penstock.observe.meters.nvml import Nvml

_READINGS_PER_SEARCH = 20
"""Every so many readings those accelerators are asked that held no memory: on a machine of eight, most never do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """The peak of a run's device memory, over all accelerators that the process uses."""

    peak_nbytes: int
    """The most that tensors held at once, by the allocator's own count of each accelerator."""

    peak_reserved_nbytes: int
    """The most that torch's allocator had reserved, cached blocks included."""

    total_nbytes: int | None = None
    """Of the accelerators that were used; None where unknown."""

    retries: int = 0
    """Allocations that succeeded only after cached blocks had been freed: memory was full."""

    out_of_memory: int = 0
    """Out-of-memory errors raised by the allocator."""

    weights_nbytes: int | None = None
    """Of the peak, parameters and buffers; None where no `penstock.TrainStep` tells the model."""

    gradients_nbytes: int = 0
    """Of the peak, gradients, where `weights_nbytes` is known."""

    optimizer_nbytes: int = 0
    """Of the peak, the optimizer's state, where `weights_nbytes` is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReading:
    """All accelerators that this process uses, at one time; None where a figure is not available."""

    nbytes: int | None = None
    """Memory of tensors."""

    peak_nbytes: int | None = None
    """The most so far, also between readings."""

    reserved_nbytes: int | None = None
    """Memory that torch's allocator has reserved, cached blocks included."""

    utilization: float | None = None
    """Mean fraction of the driver's last sample period in which they ran a kernel, between 0 and 1."""


class DeviceMeter:
    """Reads accelerators. Must be created in the main thread (see `Nvml`)."""

    def __init__(self) -> None:
        self._nvml = Nvml.open()
        self._stats: dict[int, dict[str, int]] = {}
        self._peaks: dict[int, tuple[int, int]] = {}
        self._uuids: dict[int, str] = {}
        self._until_search = 0
        self._peak: DeviceMemory | None = None

    def peak(self) -> DeviceMemory | None:
        """Return the peak until the last reading; None without an accelerator."""
        return self._peak

    def read(self) -> DeviceReading:
        """Return the current figures. Costs tens of microseconds, and driver calls for each GPU in use."""
        torch = _initialized_torch()
        if torch is None:
            return DeviceReading()
        try:
            self._read_stats(torch)
        except (AttributeError, KeyError, RuntimeError, NotImplementedError):  # no caching allocator of torch's
            return DeviceReading()
        used = [stats["allocated_bytes.all.current"] for stats in self._stats.values()]
        reserved = [stats["reserved_bytes.all.current"] for stats in self._stats.values()]
        self._note_peak(torch)
        return DeviceReading(
            nbytes=sum(used),
            peak_nbytes=self._peak.peak_nbytes if self._peak is not None else None,
            reserved_nbytes=sum(reserved),
            utilization=self._nvml.utilization(list(self._uuids.values())) if self._nvml is not None else None,
        )

    def _read_stats(self, torch: Any) -> None:
        """Read the allocator's counters of the accelerators in use: torch makes a dictionary of hundreds for each."""
        indices = list(self._stats)
        if not (indices and self._until_search):
            indices, self._until_search = list(range(torch.accelerator.device_count())), _READINGS_PER_SEARCH
        self._until_search -= 1
        for index in indices:
            stats = torch.accelerator.memory_stats(index)
            if not (stats and (index in self._stats or stats["reserved_bytes.all.current"])):
                continue
            self._stats[index] = stats
            if index not in self._uuids and (uuid := _uuid(torch, index)):
                self._uuids[index] = uuid

    def _note_peak(self, torch: Any) -> None:
        for index, stats in self._stats.items():  # programs reset the allocator's peaks, so the largest is kept
            allocated, reserved = self._peaks.get(index, (0, 0))
            self._peaks[index] = (
                max(allocated, stats["allocated_bytes.all.peak"]),
                max(reserved, stats["reserved_bytes.all.peak"]),
            )
        if not self._peaks:
            return
        before, every = self._peak, self._stats.values()
        found = DeviceMemory(
            peak_nbytes=sum(peak for peak, _ in self._peaks.values()),
            peak_reserved_nbytes=sum(peak for _, peak in self._peaks.values()),
            total_nbytes=before.total_nbytes if before is not None else _total_nbytes(torch, list(self._stats)),
            retries=sum(stats.get("num_alloc_retries", 0) for stats in every),
            out_of_memory=sum(stats.get("num_ooms", 0) for stats in every),
        )
        if before is None or found.peak_nbytes > before.peak_nbytes:
            self._peak = _with_roles(found)
        else:
            now = {name: getattr(found, name) for name in ("peak_reserved_nbytes", "retries", "out_of_memory")}
            self._peak = replace(before, **now)


def _with_roles(found: DeviceMemory) -> DeviceMemory:
    """Add what is known to hold the memory: a few thousand sizes, read only when the peak has risen."""
    module: Any = sys.modules.get("penstock.memory.live_steps")  # importing it would import torch
    try:
        held = module.held_by_steps()
    except (AttributeError, RuntimeError):  # not imported, or a model or a state changed meanwhile
        return found
    if held is None:
        return found
    room = found.peak_nbytes - held.weights - held.optimizer
    return replace(
        found,
        weights_nbytes=held.weights,
        gradients_nbytes=max(0, min(held.gradients, room)),
        optimizer_nbytes=held.optimizer,
    )


def _initialized_torch() -> Any:
    """Return torch if its import is complete and an accelerator is initialized."""
    torch: Any = sys.modules.get("torch")
    if torch is None or "torch.accelerator" not in sys.modules or not hasattr(torch, "get_device_module"):
        return None
    current = torch.accelerator.current_accelerator()
    if current is None:
        return None
    is_initialized = getattr(torch.get_device_module(current), "is_initialized", None)
    return torch if is_initialized is not None and is_initialized() else None


def _uuid(torch: Any, index: int) -> str:
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None) if torch.cuda.is_initialized() else None
    return "" if uuid is None else f"GPU-{uuid}"


def _total_nbytes(torch: Any, indices: list[int]) -> int | None:
    if not torch.cuda.is_initialized():
        return None
    sizes = [getattr(torch.cuda.get_device_properties(index), "total_memory", None) for index in indices]
    return None if None in sizes else sum(size for size in sizes if size is not None)
