"""A plan, corrected by what its choice really takes: forward and backward on the model itself, measured and undone.

The optimizer is not stepped. Gradients that are there are set aside; buffers, random states and the blocks' forward are
put back.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from penstock.core.units import size_text
from penstock.memory.blocks import blocks_of, checkpoint_blocks
from penstock.memory.buffers import Buffers
from penstock.memory.failure import attempt
from penstock.memory.headroom import AllocatorMeter
from penstock.memory.holdings import LossFunction, accelerators_of
from penstock.memory.microbatch import Split
from penstock.memory.random_state import RandomState
from penstock.memory.ways import Plan, Way

Gauge = Callable[[Callable[[], None]], int]
"""Runs something, and returns the bytes that it took at most on top of what was held before."""

_TRIES = 3
"""Choices that are tried, each smaller than the one before, when they run out of memory."""


def allocator_gauge(device: torch.device, body: Callable[[], None]) -> int:
    """Run `body`, and return the most that torch's allocator handed out for it; its record of the peak is reset."""
    meter = AllocatorMeter(device)
    torch.accelerator.reset_peak_memory_stats(device)
    held = meter.held()
    body()
    torch.accelerator.synchronize(device)
    return meter.peak() - held


def verified(
    plan: Plan, model: nn.Module, loss_fn: LossFunction, batch: Any, split: Split, gauge: Gauge | None = None
) -> Plan:
    """Return `plan` with the peaks that a measured run of its choice says, and the choice that follows.

    What did not go through at all does not fit. Where the step cannot be run like that (the batch is elsewhere, say),
    the plan says why.
    """
    gauge = gauge or functools.partial(allocator_gauge, accelerators_of(model)[0])
    for _ in range(_TRIES):
        way = plan.choice
        if way is None:
            return plan
        try:
            outcome = attempt(functools.partial(_measure, way, model, loss_fn, batch, split, gauge))
        except Exception as error:  # noqa: BLE001  the user's code, with a batch that was only meant to be planned with
            return replace(plan, verified=f"not verified by a measured step: {type(error).__name__}: {error}")
        if outcome.value is not None:
            return _corrected(plan, way, outcome.value)
        assert outcome.failure is not None
        words = f"{way.settings()} ran out of memory when it was tried ({outcome.failure.text})"
        smaller = tuple(one for one in plan.ways if one.gather_nbytes < way.gather_nbytes)
        plan = replace(plan.chosen(smaller), verified=words)
    return plan


def _measure(way: Way, model: nn.Module, loss_fn: LossFunction, batch: Any, split: Split, gauge: Gauge) -> int:
    parts = split(batch, way.parts) if way.parts > 1 else [batch]

    def gather() -> None:
        for part in list(parts)[:2]:
            loss_fn(model, part)[0].backward()

    with _undone(model), _run_as(way, model):
        return gauge(gather)


def _corrected(plan: Plan, way: Way, taken: int) -> Plan:
    """Return the plan with what is taken on top of what is held in proportion to what was found for `way`."""
    expected = way.gather_nbytes - way.held_nbytes
    ratio = taken / expected if expected else 1.0
    said = f"verified by a measured step of {way.settings()}: {size_text(taken)} on top of what is held, "
    found = replace(plan, verified=f"{said}{size_text(expected)} were predicted ({ratio - 1:+.1%})")
    return found.chosen(tuple(_scaled(one, ratio) for one in plan.ways))


def _scaled(way: Way, ratio: float) -> Way:
    gather = way.held_nbytes + int(ratio * (way.gather_nbytes - way.held_nbytes))
    peak = gather if way.peak_nbytes == way.gather_nbytes else max(gather, way.peak_nbytes)
    others = way.by_role["temporaries"] + peak - way.peak_nbytes
    return replace(way, gather_nbytes=gather, peak_nbytes=peak, by_role={**way.by_role, "temporaries": others})


@contextlib.contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Let what happens inside change nothing of the model, nor of what is drawn at random afterwards."""
    before, buffers = RandomState.now(accelerators_of(model)), Buffers(model)
    gradients = [(param, param.grad) for param in model.parameters()]
    buffers.save()
    try:
        for param, _ in gradients:
            param.grad = None
        yield
    finally:
        for param, gradient in gradients:
            param.grad = gradient
        buffers.restore()
        before.restore()


@contextlib.contextmanager
def _run_as(way: Way, model: nn.Module) -> Iterator[None]:
    """Run the model's blocks as `way` says."""
    forwards = [(block, block.__dict__.get("forward")) for _, block in blocks_of(model)]
    try:
        if way.checkpoint:
            checkpoint_blocks(model, offload=way.offload)
        yield
    finally:
        for block, forward in forwards:
            block.__dict__.pop("forward", None)
            if forward is not None:
                block.forward = forward
