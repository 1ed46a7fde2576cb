"""What the step does: waits for the device, copies that do not overlap, pages pinned for nothing."""

from __future__ import annotations

from penstock.observe.examination import Call, Examination
from penstock.observe.finding import Finding


def reads_back(found: Examination) -> Finding | None:
    """Every step reads a tensor back, and waits for the device."""
    calls = found.step.reads_back if found.step is not None else ()
    if not calls or found.step is None:
        return None
    here = "" if found.machine.accelerator else " (there is no accelerator here, so it costs nothing here)"
    return Finding(
        name="reads-back-every-step",
        cause=f"Every step reads a value back from its device, and an accelerator stands still meanwhile{here}.",
        evidence=f"in each of {found.step.steps} steps: {_lines(calls)}",
        remedy=(
            "keep the value as a tensor (`total += loss.detach()`), and read it every so many steps only, or once "
            "at the end of an epoch"
        ),
    )


def non_blocking_from_pageable(found: Examination) -> Finding | None:
    """`non_blocking=True` from memory that is not pinned."""
    calls = found.step.pageable if found.step is not None else ()
    if not calls or found.settings.pin_memory:
        return None
    here = "" if found.machine.accelerator else " (here there is none: the batch stays where it is)"
    return Finding(
        name="non-blocking-from-pageable",
        cause=f"non_blocking=True from memory that is not pinned: the copy to an accelerator does not overlap{here}.",
        evidence=f"pin_memory=False, and in every step: {_lines(calls)}",
        remedy="pin_memory=True in the DataLoader; or penstock.DataLoader(..., device=...), which copies ahead",
    )


def pinned_for_nothing(found: Examination) -> Finding | None:
    """`pin_memory=True` without an accelerator."""
    if not found.settings.pin_memory or found.machine.accelerator:
        return None
    return Finding(
        name="pinned-for-nothing",
        cause="pin_memory=True, and there is no accelerator to copy to.",
        evidence="torch.accelerator.is_available() is False",
        remedy="pin_memory=torch.accelerator.is_available()",
    )


def _lines(calls: tuple[Call, ...]) -> str:
    shown = "; ".join(f"{call.what} in {call.line} ({call.per_step:g} a step)" for call in calls[:3])
    return shown + (f"; and {len(calls) - 3} more" if len(calls) > 3 else "")
