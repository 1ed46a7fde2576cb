"""A batch is attempted until it fits, and what reaches the user is explained."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from nested_equal import assert_same
from scarcity import Capacity, FailAt
from torch import Tensor, nn

from penstock import BackwardStep, OutOfMemoryError, TrainStep
from penstock.device.oom import is_out_of_memory
from penstock.memory.planning import planner


def model_of(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5), nn.Linear(width, width)).double()


def step_of(model: nn.Module, **options: Any) -> BackwardStep:
    return BackwardStep(
        model, lambda model, batch: model(batch).square().sum() / batch.shape[-1], weight="sum", **options
    )


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_a_loop_under_the_guard_has_the_same_gradients_wherever_it_failed() -> None:
    batch = torch.ones(6, 16, dtype=torch.float64)
    clean = model_of()
    with FailAt() as counting:
        step_of(clean)(batch)
    for number in range(counting.count - 1):
        model = model_of()
        with FailAt([number]):
            step_of(model)(batch)
        assert torch.equal(gradients(model), gradients(clean)), number


def test_gradients_of_earlier_batches_are_kept_after_a_failure() -> None:
    first, second = (torch.full((4, 16), value, dtype=torch.float64) for value in (1.0, 2.0))

    def accumulated(fail_at: list[int], optimizer: bool) -> tuple[Tensor, int]:
        model = model_of()
        step = step_of(model, optimizer=torch.optim.SGD(model[0].parameters()) if optimizer else None)
        step(first)
        with FailAt(fail_at) as counting:
            step(second)
        return gradients(model), counting.count

    for optimizer in (False, True):
        expected, count = accumulated([], optimizer)
        for number in range(0, count, 4):
            assert torch.equal(accumulated([number], optimizer)[0], expected), number


class Recalling(nn.Module):
    """Carries a hidden state over, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.hidden, self.calls = torch.zeros(4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.layer(x) + self.hidden * self.calls
        self.hidden = found.detach().mean(0)
        return found


def test_what_a_model_remembers_is_as_before_each_try() -> None:
    def recalled(fail_at: list[int]) -> tuple[Any, int]:
        torch.manual_seed(0)
        model, batch = Recalling(), torch.arange(8.0).view(2, 4)
        with FailAt(fail_at) as counting:
            step_of(model)(batch)
        return (model.hidden, model.calls, gradients(model)), counting.count

    expected, count = recalled([])
    for number in range(count):
        assert_same(recalled([number])[0], expected, f"{number}")


def test_sizes_shrink_to_what_fits_and_are_remembered() -> None:
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())))
    batch = torch.randn(32, 50, 64)
    calls: list[int] = []
    model.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    with Capacity() as memory:
        step_of(model)(batch)
    model.zero_grad()
    calls.clear()
    step = step_of(model)
    with Capacity(memory.peak // 3):
        step(batch)
        assert calls[:2] == [32, 32]
        calls.clear()
        step(batch)
    assert max(calls) < 32
    assert step.largest_fitting in calls


def test_a_sample_that_does_not_fit_is_explained() -> None:
    model, batch = model_of(), torch.ones(1, 16, dtype=torch.float64)
    with (
        pytest.raises(OutOfMemoryError, match=r"memory ran out: 1\.0 GiB more was needed") as caught,
        FailAt(range(1000)),
    ):
        step_of(model)(batch)
    text = str(caught.value)
    assert "in forward of Linear" in text
    assert "test_attempts.py:" in text
    assert "model(batch).square().sum()" in text
    assert "on cpu: weights" in text
    assert is_out_of_memory(caught.value)


@pytest.mark.filterwarnings("ignore:alive is changed by loss_fn")
def test_what_a_failure_kept_alive_is_free_before_the_next_try() -> None:
    alive: list[int] = []

    class Held:
        count = 0

        def __init__(self) -> None:
            Held.count += 1

        def __del__(self) -> None:
            Held.count -= 1

    def deep(level: int) -> None:
        held = Held()
        if level:
            deep(level - 1)
        else:
            try:
                raise KeyError("a context")
            except KeyError as error:
                raise torch.OutOfMemoryError("no more") from error
        del held

    gc.disable()
    try:
        model = model_of()

        def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
            alive.append(Held.count)
            if len(alive) < 3:
                deep(5)
            found: Tensor = model(x).sum()
            return found

        BackwardStep(model, loss_fn, allow_batch_dependent=True)(torch.ones(4, 16, dtype=torch.float64))
    finally:
        gc.enable()
    assert set(alive) == {0}
    assert len(alive) >= 3


def test_auto_begins_with_the_size_that_the_plan_predicts_to_fit() -> None:
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())))
    batch = torch.randn(32, 50, 64)

    def loss_fn(module: nn.Module, part: Any) -> tuple[Tensor, int]:
        return module(part).square().sum(), len(part)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ways = planner.plan(model, loss_fn, batch, optimizer, budget="1GiB").variants
    quarter = next(variant for variant in ways if variant.parts == 4)
    step = TrainStep(model, optimizer, loss_fn, micro_batch="auto", budget=int(quarter.peak_nbytes * 1.1))
    step(batch)
    assert step.statistics().micro_batch == 8
    assert step.statistics().out_of_memory == 0


def test_the_callers_weights_are_not_changed_by_an_explanation() -> None:
    model = model_of()
    before, batch = copy.deepcopy(model.state_dict()), torch.ones(1, 16, dtype=torch.float64)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), lambda m, b: (m(b).sum(), len(b)))
    with pytest.raises(OutOfMemoryError), FailAt(range(2, 1000)):
        step(batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
