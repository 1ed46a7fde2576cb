"""Whether the slots of a loader are page-locked, and what protects them while copies read them.

With `device=` the prefetcher makes the copies and keeps a batch until its copy is over; slots are fenced from the first
batch on that has parts which stay on the host, where the user may copy them. With `pin_memory` the user makes them all,
so a slot is fenced when its last view has died. Where the device cannot fence, a batch is pinned as torch does: copied
to memory of torch's own allocator, which protects it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import dataloader as torch_module

from penstock.device import Device, Event, Registration, device_of
from penstock.loader.to_device.prefetch import DEPTH
from penstock.loader.transport.ring import MOST_PENDING

PinMemory = bool | Device


@dataclass(frozen=True, kw_only=True, slots=True)
class Pinning:
    """How a loader's ring is page-locked, and what remains to be done to each batch."""

    pin: Callable[[memoryview], Registration | None] | None = None
    fence: Callable[[], Event | None] | None = None
    finish: Callable[[Any], Any] | None = None
    """Pins the parts of a batch that are not in a page-locked slot."""
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
            slots_in_copies=DEPTH + MOST_PENDING,
            reason=f"slots, for copies to {target.name}"
            if target.can_register
            else f"a copy in torch's pinned memory, because {target.name} cannot page-lock slots",
        )
    if wanted is False:
        return Pinning()
    if not isinstance(wanted, bool):
        return _fenced(wanted)
    accelerator = _accelerator(torchs_device)
    if accelerator is None:
        return Pinning(reason="no: there is no accelerator")
    finish = functools.partial(torch.utils.data._utils.pin_memory.pin_memory, device=accelerator.torch_device.type)
    if not accelerator.has_fence:
        reason = f"a copy in torch's pinned memory, because {accelerator.name} has no event for all streams"
        return Pinning(finish=finish, reason=reason)
    return replace(_fenced(accelerator), finish=finish)


def _fenced(device: Device) -> Pinning:
    return Pinning(
        pin=device.register,
        fence=device.fence,
        slots_in_copies=MOST_PENDING,
        reason=f"slots, fenced by {device.name}",
    )


def _warn_as_torch(message: str) -> None:
    """Warn from where torch's iterator does, so that a program's filters meet the warning."""
    line = torch_module._SingleProcessDataLoaderIter.__init__.__code__.co_firstlineno
    registry = vars(torch_module).setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, UserWarning, torch_module.__file__, line, torch_module.__name__, registry)


def _accelerator(torchs_device: str) -> Device | None:
    """Return the accelerator that torch would pin for, or None where it would not pin; warns as torch does."""
    if torchs_device:
        _warn_as_torch(
            "pin_memory_device is deprecated, the current accelerator will be used as the device, "
            f"ignore pin_memory_device='{torchs_device}'."
        )
    if not torch.accelerator.is_available():
        _warn_as_torch(
            "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used."
        )
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type == "mps":
        return None
    return device_of(accelerator)
