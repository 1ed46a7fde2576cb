"""Measures the accelerator memory that this process uses, and the accelerators' utilization.

Reads nothing before the program has imported torch and initialized an accelerator. The meter must never initialize one:
a process with a CUDA context cannot fork workers that use CUDA.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from penstock.observe.meters.nvml import Nvml


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReading:
    """All accelerators that this process uses, at one time; None where a figure is not available."""

    nbytes: int | None = None
    """Memory of tensors."""

    reserved_nbytes: int | None = None
    """Memory that torch's allocator has reserved, cached blocks included."""

    utilization: float | None = None
    """Mean fraction of the driver's last sample period in which they ran a kernel, between 0 and 1."""


class DeviceMeter:
    """Reads accelerators. Must be created in the main thread (see `Nvml`)."""

    def __init__(self) -> None:
        self._nvml = Nvml.open()

    def read(self) -> DeviceReading:
        """Return the current figures. Costs tens of microseconds, and a driver call for each GPU in use."""
        torch = _initialized_torch()
        if torch is None:
            return DeviceReading()
        memory = torch.accelerator
        try:
            devices = range(memory.device_count())
            used = [memory.memory_allocated(index) for index in devices]
            reserved = [memory.memory_reserved(index) for index in devices]
        except (AttributeError, RuntimeError, NotImplementedError):  # an accelerator without torch's caching allocator
            return DeviceReading()
        uuids = _uuids(torch, [index for index in devices if reserved[index]])
        utilization = self._nvml.utilization(uuids) if self._nvml is not None else None
        return DeviceReading(nbytes=sum(used), reserved_nbytes=sum(reserved), utilization=utilization)


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


def _uuids(torch: Any, indices: list[int]) -> list[str]:
    if not torch.cuda.is_initialized():
        return []
    found = (getattr(torch.cuda.get_device_properties(index), "uuid", None) for index in indices)
    return [f"GPU-{uuid}" for uuid in found if uuid is not None]
