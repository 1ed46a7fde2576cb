"""How much memory of accelerators this process takes, and how busy they are.

Looks only once the program has imported torch and begun to use an accelerator: nothing here may begin it, because a
process that has a CUDA context cannot fork workers that use CUDA.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from penstock.observe.nvml import Nvml


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLook:
    """One look at all accelerators that this process uses; None is what could not be told."""

    nbytes: int | None = None
    """Memory of tensors."""

    reserved_nbytes: int | None = None
    """Memory that torch's allocator has taken, cached blocks included."""

    busy: float | None = None
    """Share of the last while in which they ran something, between 0 and 1."""


class DeviceMeter:
    """Looks at accelerators. To be made in the main thread (see `Nvml`)."""

    def __init__(self) -> None:
        self._nvml = Nvml.open()

    def look(self) -> DeviceLook:
        """Look once; costs some ten microseconds, and a driver call where there is a GPU in use."""
        torch = _initialized_torch()
        if torch is None:
            return DeviceLook()
        memory = torch.accelerator
        try:
            devices = range(memory.device_count())
            used = [memory.memory_allocated(index) for index in devices]
            reserved = [memory.memory_reserved(index) for index in devices]
        except (AttributeError, RuntimeError, NotImplementedError):  # an accelerator without torch's caching allocator
            return DeviceLook()
        uuids = _uuids(torch, [index for index in devices if reserved[index]])
        busy = self._nvml.busy(uuids) if self._nvml is not None else None
        return DeviceLook(nbytes=sum(used), reserved_nbytes=sum(reserved), busy=busy)


def _initialized_torch() -> Any:
    """Return torch if it is imported to its end and has begun to use an accelerator."""
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
