"""Gradients that no optimizer of the step uses are as without the failure, and several optimizers step once each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from nested_equal import assert_same
from scarcity import FailAt
from torch import Tensor, nn

from penstock import BackwardStep, OptionError, TrainStep


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def sum_of_squares(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch).square().sum(), len(batch)


def trained_beside(fail_at: list[int], *, is_outside: bool) -> tuple[Any, int]:
    """Train with a head whose gradients add up over two steps: part of the model, or known to the loss alone."""
    model, head = make_model(), nn.Linear(2, 2)
    whole = model if is_outside else nn.Sequential(model, head)
    scale = torch.ones(2, requires_grad=True)

    def loss_fn(module: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        out = module(batch)
        return ((head(out) if is_outside else out) * scale).square().sum(), len(batch)

    step = TrainStep(whole, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    first, second = torch.ones(3, 4), torch.full((3, 4), 2.0)
    step(first)
    with FailAt(fail_at) as counting:
        step(second)
    return copy.deepcopy((whole.state_dict(), [p.grad for p in (*head.parameters(), scale)])), counting.count


@pytest.mark.parametrize("is_outside", [False, True])
def test_gradients_of_parameters_that_are_stepped_elsewhere_are_put_back(is_outside: bool) -> None:
    expected, count = trained_beside([], is_outside=is_outside)
    for number in range(0, count, 3):
        assert_same(trained_beside([number], is_outside=is_outside)[0], expected, f"{number}")


def test_gradients_of_a_batch_are_those_of_one_attempt() -> None:
    def trained(fail_at: list[int]) -> Any:
        model = make_model()
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), sum_of_squares)
        batch = torch.ones(3, 4, requires_grad=True)
        with FailAt(fail_at) as counting:
            step(batch)
        return batch.grad, counting.count

    expected, count = trained([])
    for number in range(0, count, 3):
        assert_same(trained([number])[0], expected, f"{number}")


def with_two_optimizers(fail_at: list[int], **options: Any) -> tuple[Any, int, TrainStep]:
    model = make_model()
    body, head = list(model[:4].parameters()), list(model[4:].parameters())
    optimizers = [torch.optim.Adam(body, lr=0.1), torch.optim.SGD(head, lr=0.1, momentum=0.9)]
    step = TrainStep(model, optimizers, sum_of_squares, clip_grad_norm=1.0, **options)
    first, second = torch.ones(3, 4), torch.full((3, 4), 2.0)
    step(first)
    with FailAt(fail_at) as counting:
        step(second)
    return copy.deepcopy((model.state_dict(), [one.state_dict() for one in optimizers])), counting.count, step


def test_two_optimizers_step_as_by_hand_and_survive_a_failure_anywhere() -> None:
    model = make_model()
    optimizers = [
        torch.optim.Adam(model[:4].parameters(), lr=0.1),
        torch.optim.SGD(model[4:].parameters(), lr=0.1, momentum=0.9),
    ]
    for value in (1.0, 2.0):
        model.zero_grad()
        (sum_of_squares(model, torch.full((3, 4), value))[0] / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in optimizers:
            one.step()
    expected, count, _ = with_two_optimizers([])
    assert_same(expected[0], model.state_dict())
    for number in range(0, count, 3):
        assert_same(with_two_optimizers([number])[0], expected, f"{number}")


def test_several_optimizers_are_scaled_and_planned_together() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    *_, step = with_two_optimizers([], scaler=scaler, micro_batch="auto", budget="1GiB")
    assert step.statistics().steps == 2


class Container:
    """Steps several optimizers, and has no groups."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        """Step them."""


class Narrow(torch.optim.SGD):
    """Has an optimizer inside whose parameters are not its own."""

    def __init__(self, params: Any, inner: torch.optim.Optimizer) -> None:
        super().__init__(params)
        self.inner = inner


def test_optimizers_whose_parameters_are_not_known_are_refused() -> None:
    model = make_model()
    first, last = (torch.optim.Adam(model[at].parameters()) for at in (0, 4))
    lbfgs = torch.optim.LBFGS(model[0].parameters())
    for optimizer, words in (
        (Container([first, last]), "a Container has no param_groups and step.*as a list"),
        (Narrow(model[0].parameters(), last), "a Narrow has a Adam inside, with parameters that are not in its own"),
        (Narrow(model[0].parameters(), lbfgs), "LBFGS evaluates the loss by itself"),
        ([first, lbfgs], "LBFGS evaluates the loss by itself"),
        ([], "the list of optimizers is empty"),
    ):
        with pytest.raises(OptionError, match=words):
            TrainStep(model, optimizer, sum_of_squares)  # type: ignore[arg-type]


def test_an_optimizer_that_steps_in_backward_is_refused() -> None:
    model = make_model()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    handles = [p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step()) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptionError, match="has a hook that runs when its gradient is there"):
        TrainStep(model, optimizer, sum_of_squares)
    with pytest.raises(OptionError, match="has a hook that runs when its gradient is there"):
        BackwardStep(model, lambda model, batch: model(batch).sum())
    for handle in handles:
        handle.remove()
    TrainStep(model, optimizer, sum_of_squares)
