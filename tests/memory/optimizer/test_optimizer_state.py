"""An optimizer is stepped without what records it in a profile only where nobody can see a difference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from penstock import TrainStep
from penstock.memory.optimizer.optimizer_state import step_without_hooks

BATCH = torch.ones(4, 3)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).square().sum(), len(batch)


def made(kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> tuple[torch.optim.Optimizer, TrainStep]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, TrainStep(model, optimizer, loss_fn)


def test_a_later_step_is_in_a_profile_as_a_step_by_hand_is() -> None:
    _, step = made()
    for _ in range(3):
        step(BATCH)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step(BATCH)
    assert "Optimizer.step#SGD.step" in {event.key for event in profiled.key_averages()}


def test_hooks_run_once_in_each_step_whenever_they_are_added() -> None:
    optimizer, step = made()
    ran: list[str] = []
    for _ in range(3):
        step(BATCH)
    before = optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after"))
    step(BATCH)
    step(BATCH)
    before.remove()
    step(BATCH)
    assert ran == ["before", "after", "before", "after", "after"]


@pytest.mark.parametrize("place", ["instance", "class"])
def test_a_step_that_somebody_has_wrapped_is_called_by_its_wrapper(place: str) -> None:
    class Wrapped(torch.optim.SGD):
        pass

    optimizer = Wrapped(nn.Linear(3, 2).parameters(), lr=0.1)
    original: Any = optimizer.step if place == "instance" else Wrapped.step
    ran: list[str] = []

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        ran.append(place)
        return original(*args, **kwargs)

    wrapped: Any = optimizer if place == "instance" else Wrapped
    wrapped.step = wrapper
    step_without_hooks(optimizer)()
    assert ran == [place]


def test_a_step_without_recording_has_the_same_weights() -> None:
    optimizer, step = made()
    for _ in range(4):
        step(BATCH)
    weights = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    other, by_hand = made()
    other.register_step_pre_hook(lambda *_: None)  # keeps all that torch does around a step
    for _ in range(4):
        by_hand(BATCH)
    assert all(map(torch.equal, weights, [p for group in other.param_groups for p in group["params"]]))
    assert step_without_hooks(optimizer) != optimizer.step
