"""What an out-of-memory that reaches the user says: what was needed and where, what held the memory, what would do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.core.errors import PenstockError
from penstock.core.units import size_text
from penstock.memory.allocator import allocator_findings
from penstock.memory.failure import Failure
from penstock.memory.ledger import DeviceBytes, ledger
from penstock.memory.planner import plan
from penstock.memory.ways import Plan

Step = tuple[Callable[[nn.Module, Any], Any], Any]
"""A loss function, and the batch that it failed on."""


class OutOfMemoryError(PenstockError, torch.OutOfMemoryError):
    """Memory ran out, and smaller parts were of no help. Its text says what would have been."""


def explain(failure: Failure, model: nn.Module, optimizer: Optimizer | None, step: Step | None = None) -> str:
    """Return a failure in words, with all that can be found out about it now.

    Args:
        failure: what was written down when it happened.
        model: whose share of the memory is told.
        optimizer: likewise.
        step: with it, what would have fitted is planned.
    """
    lines = [_what(failure), _where(failure)]
    account = ledger(model, optimizer)
    device = account.devices[0]
    lines.append(_held(device))
    if device.device != "cpu":
        lines += [_kind(failure, device), *allocator_findings()]
        if step is not None:
            lines.append(_remedy(model, optimizer, step, device))
    return "\n".join(line for line in lines if line)


def _what(failure: Failure) -> str:
    needed = f"{size_text(failure.requested)} more" if failure.requested is not None else "more memory"
    return f"memory ran out: {needed} was needed ({failure.text})"


def _where(failure: Failure) -> str:
    phase = "backward" if failure.in_backward else "forward" if failure.module else ""
    of = f" of {failure.module}" if failure.module else ""
    by = f" by {failure.operator}" if failure.operator and not failure.in_backward else ""
    where = f"in {phase}{of}" if phase else ""
    at = f" at {failure.line}" if failure.line else ""
    return f"{where}{by}{at}".strip()


def _held(device: DeviceBytes) -> str:
    roles = ("weights", "gradients", "optimizer", "others", "loader", "unseen", "cached", "outside")
    held = [(name, getattr(device, name)) for name in roles]
    parts = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in held if nbytes)
    return f"on {device.device}: {parts}" if parts else ""


def _kind(failure: Failure, device: DeviceBytes) -> str:
    """Say whether memory was used up, or lay there in pieces."""
    if failure.requested is None:
        return ""
    free = device.total - device.allocated - device.cached - device.outside
    if failure.requested <= free + device.cached:
        return (
            f"this is fragmentation: {size_text(free + device.cached)} are free or cached, in pieces; "
            "PYTORCH_ALLOC_CONF=expandable_segments:True lets pieces grow together"
        )
    return f"this is exhaustion: {size_text(free + device.cached)} of {size_text(device.total)} are free or cached"


def _remedy(model: nn.Module, optimizer: Optimizer | None, step: Step, device: DeviceBytes) -> str:
    loss_fn, batch = step
    try:
        found: Plan = plan(model, loss_fn, batch, optimizer, budget=device.total - device.outside, verify=False)
    except Exception:  # noqa: BLE001  the user's code on fake tensors; an explanation is no place to fail
        return ""
    if found.choice is None:
        return "by the plan, nothing fits this device; see penstock.plan"
    needed = size_text(found.choice.peak_nbytes)
    return f"by the plan, micro-batches of {found.choice.settings()} take {needed} and would fit"
