"""verify_plan: correct a plan by what its choice really takes.

Forward and backward run on the model itself, and are measured and undone. The optimizer is not stepped. Existing
gradients are set aside; buffers, random states and the blocks' forward are restored.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from penstock.core.units import size_text
from penstock.memory.cutting.split import Split
from penstock.memory.model_tensors import LossFunction, accelerators_of
from penstock.memory.planning.activation_checkpointing import blocks_of, checkpoint_blocks
from penstock.memory.planning.step_variants import Plan, StepVariant
from penstock.memory.recovery.out_of_memory import attempt
from penstock.memory.recovery.snapshot import Snapshot

Gauge = Callable[[Callable[[], None]], int]
"""Runs something, and returns the most bytes that it took on top of what was allocated before."""

_TRIES = 3
"""How many choices are tried, where one runs out of memory, or what it took makes another one the choice."""


def measure_allocator_peak(device: torch.device, body: Callable[[], None]) -> int:
    """Run `body`, and return the most bytes that torch's allocator allocated for it. Resets the allocator's peak."""
    torch.accelerator.reset_peak_memory_stats(device)
    before = int(torch.accelerator.memory_allocated(device))
    body()
    torch.accelerator.synchronize(device)
    return int(torch.accelerator.max_memory_allocated(device)) - before


def verify_plan(
    plan: Plan, model: nn.Module, loss_fn: LossFunction, batch: Any, split: Split, gauge: Gauge | None = None
) -> Plan:
    """Return `plan` with peaks corrected by a measured run of its choice, and the choice that follows.

    A choice that follows is measured, too. One that runs out of memory does not fit. Where the step cannot run like
    that (the batch is on another device, say), `Plan.verified` has the reason.
    """
    gauge = gauge or functools.partial(measure_allocator_peak, accelerators_of(model)[0])
    measured: set[str] = set()
    for _ in range(_TRIES):
        variant = plan.choice
        if variant is None or variant.describe() in measured:
            return plan
        try:
            outcome = attempt(functools.partial(_measure, variant, model, loss_fn, batch, split, gauge))
        except Exception as error:  # noqa: BLE001  the user's code, with a batch that was only meant to be planned with
            return replace(plan, verified=f"not verified by a measured step: {type(error).__name__}: {error}")
        if outcome.value is not None:
            plan = _correct(plan, variant, outcome.value, measured)
            measured.add(variant.describe())
            continue
        assert outcome.failure is not None
        text = f"{variant.describe()} ran out of memory when it was tried ({outcome.failure.text})"
        smaller = tuple(one for one in plan.variants if one.backward_peak_nbytes < variant.backward_peak_nbytes)
        plan = replace(plan.choose(smaller), verified=text)
    return plan


def _measure(
    variant: StepVariant, model: nn.Module, loss_fn: LossFunction, batch: Any, split: Split, gauge: Gauge
) -> int:
    parts = split(batch, variant.parts) if variant.parts > 1 else [batch]

    def run_forward_and_backward() -> None:
        for part in list(parts)[:2]:
            loss_fn(model, part)[0].backward()

    snapshot = Snapshot(model, None, ())
    snapshot.save()
    model.zero_grad()  # they are set aside, and what is measured begins without
    try:
        with _running_as(variant, model):
            return gauge(run_forward_and_backward)
    finally:
        snapshot.restore()
        snapshot.free()


def _correct(plan: Plan, variant: StepVariant, taken: int, measured: Collection[str]) -> Plan:
    """Return the plan with each variant's predicted bytes corrected by what was measured for `variant`.

    Those of `measured` were measured themselves, and keep what they took.
    What was not predicted is a workspace, which grows with the samples; gradients and the like do not. What was
    predicted and not taken is missing in proportion: a variant that holds little has little of it.
    """
    expected = variant.backward_peak_nbytes - variant.static_nbytes
    ratio = taken / expected if expected else 1.0
    of_a_sample = max(0, taken - expected) / variant.micro_batch
    text = f"verified by a measured step of {variant.describe()}: {size_text(taken)} on top of what is held, "
    found = replace(plan, verified=f"{text}{size_text(expected)} were predicted ({ratio - 1:+.1%})")
    scaled = [
        one if one.describe() in measured else _scale(one, min(1.0, ratio), int(of_a_sample * one.micro_batch))
        for one in plan.variants
    ]
    return found.choose(
        tuple(_without_bound(new) if old is variant else new for old, new in zip(plan.variants, scaled, strict=True))
    )


def _without_bound(variant: StepVariant) -> StepVariant:
    """Return a variant whose workspaces were measured."""
    return replace(variant, bound_nbytes=variant.peak_nbytes)


def _scale(variant: StepVariant, ratio: float, workspace: int) -> StepVariant:
    backward = variant.static_nbytes + int(ratio * (variant.backward_peak_nbytes - variant.static_nbytes)) + workspace
    is_peak = variant.peak_nbytes == variant.backward_peak_nbytes
    peak = backward if is_peak else max(backward, variant.peak_nbytes)
    roles = {**variant.by_role, "temporaries": variant.by_role["temporaries"] + peak - variant.peak_nbytes}
    bound = max(peak, variant.bound_nbytes)
    return replace(variant, backward_peak_nbytes=backward, peak_nbytes=peak, bound_nbytes=bound, by_role=roles)


@contextlib.contextmanager
def _running_as(variant: StepVariant, model: nn.Module) -> Iterator[None]:
    """Checkpoint the model's blocks inside, if `variant` does."""
    forwards = [(block, block.__dict__.get("forward")) for _, block in blocks_of(model)]
    try:
        if variant.checkpoint:
            checkpoint_blocks(model, offload=variant.offload, selective=variant.selective)
        yield
    finally:
        for block, forward in forwards:
            block.__dict__.pop("forward", None)
            if forward is not None:
                block.forward = forward
