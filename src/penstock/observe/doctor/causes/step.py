"""Causes that lie in the step: waiting for the device, copies that do not overlap, pinning without a device."""

from __future__ import annotations

from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.probe_results import StepCall
from penstock.observe.record.finding import Finding

_SHOWN_CALLS = 3


@cause("sync-every-step", "step_calls")
def sync_every_step(measured: Measurements) -> Finding | None:
    """Every step reads a tensor's value, which waits for the device."""
    step = required(measured.step_calls)
    if not step.synchronizing:
        return None
    here = "" if measured.machine.accelerator else " (this machine has no accelerator, so it costs nothing here)"
    return Finding(
        name="sync-every-step",
        cause=f"Every step reads a value back from its device, and an accelerator is idle meanwhile{here}.",
        evidence=f"in each of {step.steps} steps: {_describe_calls(step.synchronizing)}",
        remedy=(
            "keep the value as a tensor (`total += loss.detach()`), and read it every hundred steps, or once at the "
            "end of an epoch"
        ),
    )


@cause("non-blocking-from-pageable", "step_calls")
def non_blocking_from_pageable(measured: Measurements) -> Finding | None:
    """`non_blocking=True` from memory that is not pinned."""
    step = required(measured.step_calls)
    if not step.pageable_copies or measured.settings.pin_memory:
        return None
    here = "" if measured.machine.accelerator else " (this machine has none, so nothing is copied here)"
    return Finding(
        name="non-blocking-from-pageable",
        cause=f"non_blocking=True from memory that is not pinned: the copy to an accelerator does not overlap{here}.",
        evidence=f"pin_memory=False, and in every step: {_describe_calls(step.pageable_copies)}",
        remedy="pin_memory=True in the DataLoader; or penstock.DataLoader(..., device=...), which copies ahead",
    )


@cause("pinned-without-accelerator")
def pinned_without_accelerator(measured: Measurements) -> Finding | None:
    """`pin_memory=True` without an accelerator."""
    if not measured.settings.pin_memory or measured.machine.accelerator:
        return None
    return Finding(
        name="pinned-without-accelerator",
        cause="pin_memory=True, and there is no accelerator to copy to.",
        evidence="torch.accelerator.is_available() is False",
        remedy="pin_memory=torch.accelerator.is_available()",
    )


def _describe_calls(calls: tuple[StepCall, ...]) -> str:
    shown = "; ".join(f"{call.what} in {call.line} ({call.per_step:g} per step)" for call in calls[:_SHOWN_CALLS])
    return shown + (f"; and {len(calls) - _SHOWN_CALLS} more" if len(calls) > _SHOWN_CALLS else "")
