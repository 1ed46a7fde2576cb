"""The message of an out-of-memory error that reaches the user.

It reports what was needed and where, what held the memory, and what would have fitted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from penstock.core.units import size_text
from penstock.memory.accounting.ledger import DeviceBytes, ledger
from penstock.memory.planning.planner import plan
from penstock.memory.planning.step_variants import Plan
from penstock.memory.recovery.out_of_memory import Failure

Step = tuple[Callable[[nn.Module, Any], Any], Any]
"""A loss function, and the batch that it failed on."""


def explain_failure(failure: Failure, model: nn.Module, optimizer: Optimizer | None, step: Step | None = None) -> str:
    """Return a text about a failure, with all that can be found out about it now.

    Args:
        failure: described when it happened.
        model: whose share of the memory is reported.
        optimizer: whose share of the memory is reported.
        step: with it, a plan finds what would have fitted.
    """
    lines = [_need_text(failure), _where_text(failure)]
    account = ledger(model, optimizer)
    device = account.devices[0]
    lines.append(_holders_text(device))
    if device.device != "cpu":
        lines.append(_cause_text(failure, device))
        if step is not None:
            lines.append(_remedy_text(model, optimizer, step, device))
    return "\n".join(line for line in lines if line)


def _need_text(failure: Failure) -> str:
    needed = f"{size_text(failure.requested_nbytes)} more" if failure.requested_nbytes is not None else "more memory"
    return f"memory ran out: {needed} was needed ({failure.text})"


def _where_text(failure: Failure) -> str:
    phase = "backward" if failure.in_backward else "forward" if failure.module else ""
    of = f" of {failure.module}" if failure.module else ""
    by = f" by {failure.operator}" if failure.operator and not failure.in_backward else ""
    where = f"in {phase}{of}" if phase else ""
    at = f" at {failure.line}" if failure.line else ""
    return f"{where}{by}{at}".strip()


def _holders_text(device: DeviceBytes) -> str:
    roles = ("weights", "gradients", "optimizer", "others", "loader", "unseen", "cached", "outside")
    held = [(name, getattr(device, name)) for name in roles]
    parts = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in held if nbytes)
    return f"on {device.device}: {parts}" if parts else ""


def _cause_text(failure: Failure, device: DeviceBytes) -> str:
    """Return whether memory was used up or fragmented."""
    if failure.requested_nbytes is None:
        return ""
    free = device.total - device.allocated - device.cached - device.outside
    if failure.requested_nbytes <= free + device.cached:
        return (
            f"this is fragmentation: {size_text(free + device.cached)} are free or cached, in pieces; "
            "set PYTORCH_ALLOC_CONF=expandable_segments:True to join them"
        )
    return f"this is exhaustion: {size_text(free + device.cached)} of {size_text(device.total)} are free or cached"


def _remedy_text(model: nn.Module, optimizer: Optimizer | None, step: Step, device: DeviceBytes) -> str:
    loss_fn, batch = step
    try:
        found: Plan = plan(model, loss_fn, batch, optimizer, budget=device.total - device.outside, verify=False)
    except Exception:  # noqa: BLE001  the user's code on fake tensors; an explanation is no place to fail
        return ""
    if found.choice is None:
        return "the plan predicts that nothing fits this device; see penstock.plan"
    needed = size_text(found.choice.peak_nbytes)
    return f"the plan predicts that micro-batches of {found.choice.describe()} take {needed} and fit"
