"""An optimizer's own step happens once, wherever memory runs out in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nested_equal import assert_same
from scarcity import FailAt
from torch import nn

from penstock import OutOfMemoryError
from penstock.memory.guarded_optimizer import guard_optimizer
from penstock.memory.recovery.out_of_memory import FailureLog


def stepped(fail_at: list[int], *, guarded: bool = True, closure: bool = False, late: bool = False) -> tuple[Any, int]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if guarded and not late:
        guard_optimizer(optimizer, model, FailureLog())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    if guarded:
        guard_optimizer(optimizer, model, FailureLog())  # a second time has no effect
    mode = FailAt(fail_at)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = model(torch.ones(2, 4)).square().sum()
        found.backward()
        return found

    for _ in range(3):
        if closure:
            optimizer.step(loss)
        else:
            loss()
            with mode:
                optimizer.step()
        scheduler.step()
    return (model.state_dict(), optimizer.state_dict()), mode.count


@pytest.mark.parametrize("late", [False, True])
def test_a_step_with_a_scheduler_around_it_is_done_once_wherever_it_failed(late: bool) -> None:
    expected, count = stepped([], guarded=False)
    for number in range(0, count, 3):
        assert_same(stepped([number], late=late)[0], expected, str(number))


def test_a_closure_is_called_once_before_the_step() -> None:
    assert_same(stepped([], closure=True)[0], stepped([], guarded=False)[0])


def test_memory_that_stays_short_is_explained_and_leaves_weights_as_they_were() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    guard_optimizer(optimizer, model, FailureLog())
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    with pytest.raises(OutOfMemoryError, match="the optimizer's step: memory ran out"), FailAt(range(10_000)):
        optimizer.step()
    with torch.no_grad():
        assert torch.equal(model.weight, before)
    optimizer.step()
    assert not torch.equal(model.weight, before)
