"""A step of an optimizer that is not torch's is copied at first and after a failure, and refused between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nested_equal import assert_same
from torch import Tensor, nn

from penstock.memory.optimizer.optimizer_transaction import StepTransaction
from penstock.memory.optimizer.resume_optimizer import PartialStepError
from penstock.memory.recovery.out_of_memory import FailureLog

calls_left = 0
error: type[BaseException] = torch.OutOfMemoryError


def may_fail() -> None:
    """Fail between two operations, where no dispatch mode sees it."""
    global calls_left
    calls_left -= 1
    if calls_left == 0:
        raise error("tried to allocate 1.00 GiB")


class Own(torch.optim.Optimizer):
    """Steps parameter by parameter; subclasses say how."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["step"], state["m"] = 0, torch.zeros_like(p)
                    state["step"] += 1
                    self.change(p, state["m"], group["lr"] / state["step"] / group["k"])

    def change(self, p: Any, m: Tensor, lr: float) -> None:
        raise NotImplementedError


class Signs(Own):
    def change(self, p: Any, m: Tensor, lr: float) -> None:
        update = m.clone().mul_(0.9).add(p.grad).sign_()
        may_fail()
        p.add_(update, alpha=-lr)
        may_fail()
        m.lerp_(p.grad, 0.1)
        may_fail()


class Noisy(Own):
    def change(self, p: Any, m: Tensor, lr: float) -> None:
        m.add_(p.grad + torch.randn(p.shape))
        may_fail()
        p.grad.mul_(0.5)
        may_fail()
        p.sub_(m * lr + p.grad)
        may_fail()


class ThroughData(Signs):
    def change(self, p: Any, m: Tensor, lr: float) -> None:
        p.data.mul_(0.9)
        super().change(p, m, lr)


def prepared(kind: Callable[[Any], Own], steps: int) -> tuple[StepTransaction, Own, list[nn.Parameter]]:
    global calls_left, error
    calls_left, error = 0, torch.OutOfMemoryError
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((3, 2), (2,), (4,))]
    optimizer = kind(params)
    whole = StepTransaction(optimizer, log=FailureLog())
    for _ in range(steps):
        step(whole, params)
    return whole, optimizer, params


def step(whole: StepTransaction, params: list[nn.Parameter]) -> None:
    for number, p in enumerate(params[:2]):
        p.grad = torch.full_like(p, 0.5 + number)
    whole.step()


def state(optimizer: Own) -> Any:
    return copy.deepcopy((optimizer.param_groups, list(optimizer.state.values()), torch.get_rng_state()))


@pytest.mark.parametrize("kind", [Signs, Noisy, ThroughData])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_failure_anywhere_in_the_first_step_or_once_memory_has_run_out_changes_nothing(
    kind: Callable[[Any], Own], steps: int
) -> None:
    global calls_left
    _, optimizer, params = prepared(kind, steps + 1)
    assert -calls_left == 6 * (steps + 1)
    expected = state(optimizer)
    for number in range(1, 7):
        whole, optimizer, params = prepared(kind, steps)
        whole._log.count = steps  # memory has run out in forward, say
        calls_left = number
        with pytest.raises(torch.OutOfMemoryError):
            step(whole, params)
        whole.step()
        assert_same(state(optimizer), expected, f"{number}")


def test_a_later_step_is_not_copied_and_refused_where_memory_runs_out_in_it_out_of_the_blue() -> None:
    global calls_left
    whole, _, params = prepared(Signs, 3)
    assert whole._undoable._copies == []
    calls_left = 2
    with pytest.raises(PartialStepError, match="what a step of Signs changes is copied only from the first time"):
        step(whole, params)
    with pytest.raises(PartialStepError, match="interrupted before"):
        whole.step()


def test_a_step_that_something_else_has_interrupted_is_refused_and_one_that_was_copied_is_undone() -> None:
    global calls_left, error
    whole, _, params = prepared(Signs, 3)
    calls_left, error = 4, KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        step(whole, params)
    with pytest.raises(PartialStepError, match="interrupted before"):
        whole.step()
    _, optimizer, _ = prepared(Signs, 1)
    expected = state(optimizer)
    whole, optimizer, params = prepared(Signs, 0)
    calls_left, error = 4, KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        step(whole, params)
    whole.step()
    assert_same(state(optimizer), expected)
