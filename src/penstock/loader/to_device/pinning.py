"""Whether the slots of a loader are page-locked, and what protects them while copies read them.

With `device=` the prefetcher makes the copies and keeps a batch until its copy is over; slots are fenced from the first
batch on that has parts which stay on the host, where the user may copy them. With `pin_memory` the user makes them all,
so a slot is fenced when its last view has died. Where the device cannot fence, a batch is pinned as torch does: copied
to memory of torch's own allocator, which protects it.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import dataloader as torch_module

from penstock.core.shared_segment import PrivateSegment
from penstock.device import Device, Event, Registration, TensorSpec, device_of
from penstock.loader.to_device.prefetch import DEPTH
from penstock.loader.transport.ring import MOST_PENDING

PinMemory = bool | Literal["auto"] | Device

_TRIAL_NBYTES = 16 << 20
_TRIALS = 5
_WORTH = 1.1
"""Pinned copies must be faster by this much to be worth their page-locked memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pinning:
    """How a loader's ring is page-locked, and what remains to be done to each batch."""

    pin: Callable[[memoryview], Registration | None] | None = None
    fence: Callable[[], Event | None] | None = None
    finish: Callable[[Any], Any] | None = None
    """Pins the parts of a batch that are not in a page-locked slot."""
    numa_node: int | None = None
    """Where the slots, and the workers that fill them, should be."""
    slots_in_copies: int = 0
    """How many slots copies may occupy while others are filled."""
    reason: str = ""
    """Whether batches are pinned, and why, for people."""

    @property
    def is_needed(self) -> bool:
        """Whether anything is to be done to slots or batches."""
        return self.pin is not None or self.finish is not None


def pinning_of(wanted: PinMemory, torchs_device: str, target: Device | None) -> Pinning:
    """Return how to pin for `pin_memory=wanted`, `pin_memory_device=torchs_device` and `device=target`."""
    if target is not None and not target.is_host:
        return Pinning(
            pin=target.register,
            numa_node=target.numa_node,
            slots_in_copies=DEPTH + MOST_PENDING,
            reason=f"slots, for copies to {target.name}{_near(target)}"
            if target.can_register
            else f"a copy in torch's pinned memory, because {target.name} cannot page-lock slots",
        )
    if wanted is False:
        return Pinning()
    if not isinstance(wanted, (bool, str)):
        return _fenced(wanted)
    accelerator = _accelerator(torchs_device, quiet=wanted == "auto")
    if accelerator is None:
        return Pinning(reason="no: there is no accelerator")
    because = ""
    if wanted == "auto":
        pays, measured = measure_pinning(accelerator)
        because = f", because {measured}"
        if not pays:
            return Pinning(reason=f"no{because}")
    finish = functools.partial(torch.utils.data._utils.pin_memory.pin_memory, device=accelerator.torch_device.type)
    if not accelerator.has_fence:
        reason = f"a copy in torch's pinned memory, because {accelerator.name} has no event for all streams{because}"
        return Pinning(finish=finish, reason=reason)
    return replace(_fenced(accelerator), finish=finish, reason=_fenced(accelerator).reason + because)


def _fenced(device: Device) -> Pinning:
    return Pinning(
        pin=device.register,
        fence=device.fence,
        numa_node=device.numa_node,
        slots_in_copies=MOST_PENDING,
        reason=f"slots, fenced by {device.name}{_near(device)}",
    )


def _near(device: Device) -> str:
    return "" if device.numa_node is None else f", on its NUMA node {device.numa_node}"


def measure_pinning(device: Device) -> tuple[bool, str]:
    """Return whether copies to `device` gain by pinned memory on this machine, and what was measured, for people."""
    if device.name not in _measured:
        with device.outside_capture():
            _measured[device.name] = _measure(device)
    return _measured[device.name]


_measured: dict[str, tuple[bool, str]] = {}


def _measure(device: Device) -> tuple[bool, str]:
    segment = PrivateSegment(_TRIAL_NBYTES)
    source = torch.from_numpy(np.frombuffer(segment.memory, np.uint8))
    source.fill_(1)
    pageable_s = _copy_s(device, source)
    registration = device.register(segment.memory)
    if registration is None:
        return False, f"{device.name} cannot page-lock host memory"
    pinned_s = _copy_s(device, source)
    registration.close()
    ratio = pageable_s / pinned_s
    rates = f"{_TRIAL_NBYTES / pinned_s / 1e9:.1f} against {_TRIAL_NBYTES / pageable_s / 1e9:.1f} GB/s pageable"
    return ratio >= _WORTH, f"copies to {device.name} from pinned memory run at {rates}"


def _copy_s(device: Device, source: torch.Tensor) -> float:
    """Return the seconds of a copy, the best of several."""
    target = device.empty(TensorSpec.of(source))
    best = float("inf")
    for _ in range(_TRIALS):
        device.record_event().synchronize()
        began = time.perf_counter()
        device.upload([(target, source)], device.record_event()).synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def _warn_as_torch(message: str) -> None:
    """Warn from where torch's iterator does, so that a program's filters meet the warning."""
    line = torch_module._SingleProcessDataLoaderIter.__init__.__code__.co_firstlineno
    registry = vars(torch_module).setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, UserWarning, torch_module.__file__, line, torch_module.__name__, registry)


def _accelerator(torchs_device: str, *, quiet: bool) -> Device | None:
    """Return the accelerator that torch would pin for, or None where it would not pin; warns as torch does."""
    if torchs_device:
        _warn_as_torch(
            "pin_memory_device is deprecated, the current accelerator will be used as the device, "
            f"ignore pin_memory_device='{torchs_device}'."
        )
    if not torch.accelerator.is_available():
        if not quiet:
            _warn_as_torch(
                "'pin_memory' argument is set as true but no accelerator is found, "
                "then device pinned memory won't be used."
            )
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type == "mps":
        return None
    return device_of(accelerator)
