"""release: give unused memory back, and report what each way of doing so returned.

`empty_cache` frees no tensor; it returns cached blocks to the driver. Tensors are freed when the last reference to them
ends, and by a garbage collection where they refer to each other. Host memory has two caches: torch's pinned blocks, and
the C library's heap.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.core.host import resident_nbytes
from penstock.core.units import size_text


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleasedMemory:
    """Bytes given back, by where they were. On the host, the decrease of the process's resident set."""

    device_garbage: int
    """Device memory of tensors that only referred to each other."""

    host_garbage: int
    """Host memory of tensors that only referred to each other."""

    device_cache: int
    """Cached device blocks that went back to the driver."""

    pinned_cache: int
    """torch's cache of pinned host blocks."""

    heap: int
    """Free pages of the C library's heap."""

    def __str__(self) -> str:
        parts = [
            ("garbage on the device", self.device_garbage),
            ("garbage on the host", self.host_garbage),
            ("cached device blocks", self.device_cache),
            ("cached pinned blocks", self.pinned_cache),
            ("the heap's free pages", self.heap),
        ]
        return ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in parts if nbytes) or "nothing"


def release() -> ReleasedMemory:
    """Give back all memory that nobody needs, and return how much each step gave back.

    Tensors that something still refers to stay. The next steps are slower, because blocks have to be taken from the
    driver again. So call it between phases (training, validation), not in every step.

    Example:
        >>> isinstance(release().heap, int)
        True
    """
    device_before, host_before = _allocated(), resident_nbytes()
    gc.collect()
    device_after, host_after = _allocated(), resident_nbytes()
    device_cache = _measure_drop(_reserved, _empty_device_cache)
    pinned_cache = _measure_drop(resident_nbytes, _empty_pinned_cache)
    return ReleasedMemory(
        device_garbage=max(0, device_before - device_after),
        host_garbage=max(0, host_before - host_after),
        device_cache=device_cache,
        pinned_cache=pinned_cache,
        heap=_measure_drop(resident_nbytes, _trim_heap),
    )


def _measure_drop(measure: Callable[[], int], act: Callable[[], object]) -> int:
    before = measure()
    act()
    return max(0, before - measure())


def _allocated() -> int:
    return int(torch.accelerator.memory_allocated()) if torch.accelerator.is_available() else 0


def _reserved() -> int:
    return int(torch.accelerator.memory_reserved()) if torch.accelerator.is_available() else 0


def _empty_device_cache() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        torch.accelerator.memory.empty_cache()


def _empty_pinned_cache() -> None:
    empty = getattr(torch._C, "_host_emptyCache", None) if torch.accelerator.is_available() else None
    if empty is not None:
        empty()


def _trim_heap() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
