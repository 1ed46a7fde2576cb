"""Where gradients or weights could be changed twice, or in part, a failure changes them once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nested_equal import assert_same
from scarcity import FailAt
from torch import Tensor, nn

from penstock import OutOfMemoryError, TrainStep


def sum_of_squares(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch).square().sum(), len(batch) + 1


def two_precisions() -> TrainStep:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64))
    model[0].register_forward_hook(lambda layer, inputs, output: output.double())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    return TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), sum_of_squares, scaler=scaler, clip_grad_norm=0.1
    )


def sparse_momentum() -> TrainStep:
    model = nn.Embedding(7, 3, sparse=True)
    return TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), sum_of_squares)


BATCHES: dict[Callable[[], TrainStep], Callable[[int], Tensor]] = {
    two_precisions: lambda number: torch.linspace(-1, number + 1, 12).view(3, 4),
    sparse_momentum: lambda number: torch.arange(number, number + 5),
}


def trained(make: Callable[[], TrainStep]) -> TrainStep:
    torch.manual_seed(0)
    step = make()
    for number in range(2):
        step(BATCHES[make](number))
    return step


def state(step: TrainStep) -> Any:
    return copy.deepcopy((dict(step.model.state_dict()), step.optimizer.state_dict()))


@pytest.mark.parametrize("make", BATCHES)
def test_a_failure_at_any_operation_changes_nothing(make: Callable[[], TrainStep]) -> None:
    batch = BATCHES[make](2)
    clean = trained(make)
    with FailAt() as counting:
        clean(batch)
    for number in range(counting.count):
        failing = trained(make)
        with FailAt([number]):
            failing(batch)
        assert_same(dense(state(failing)), dense(state(clean)), f"{number}")


def dense(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda one: one.to_dense() if isinstance(one, Tensor) else one, tree)


class FailingAdd:
    """Fails an in-place addition to a parameter, below which there is no mode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        self.error: type[BaseException] = torch.OutOfMemoryError
        self._add = torch.Tensor.add_
        monkeypatch.setattr(torch.Tensor, "add_", lambda *args, **kwargs: self(*args, **kwargs))

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            self.left -= 1
            if self.left == 0:
                raise self.error("tried to allocate 1.00 GiB")
        return self._add(tensor, *args, **kwargs)


def plain(*, is_flat: bool = False) -> TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if is_flat:
        flatten(model)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), sum_of_squares)
    step(torch.ones(3, 4))
    step(torch.ones(3, 4))
    return step


def flatten(model: nn.Module) -> None:
    """Let all parameters be pieces of one memory, as cuDNN has those of an LSTM."""
    flat = torch.cat([param.data.flatten() for param in model.parameters()])
    for param in model.parameters():
        param.data, flat = flat[: param.numel()].view_as(param), flat[param.numel() :]


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_parameters_that_share_a_storage_are_not_stepped_twice(fail_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clean, failing = plain(), plain(is_flat=True)
    clean(torch.ones(3, 4))
    FailingAdd(monkeypatch).left = fail_at
    if fail_at == 1:  # nothing was changed yet
        failing(torch.ones(3, 4))
        assert_same(state(failing), state(clean))
        return
    with pytest.raises(OutOfMemoryError, match="go back to a checkpoint"):  # nothing retries what fails in Python
        failing(torch.ones(3, 4))


@pytest.mark.parametrize("change", ["copied", "data replaced"])
def test_a_step_is_resumed_after_the_storage_of_parameters_was_replaced(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean, failing = plain(), plain()
    clean(torch.ones(3, 4))
    if change == "copied":
        failing = copy.deepcopy(failing)
    else:
        for param in failing.model.parameters():
            param.data = param.data.clone()
    FailingAdd(monkeypatch).left = 3
    failing(torch.ones(3, 4))
    assert_same(state(failing), state(clean))
    assert failing.statistics().out_of_memory == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("fail_at", [1, 3])
def test_a_step_that_another_error_interrupted_is_finished_by_the_next_call(
    fail_at: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    clean, broken = plain(), plain()
    failing = FailingAdd(monkeypatch)
    failing.left, failing.error = fail_at, error
    with pytest.raises(error):
        broken(torch.ones(3, 4))
    for step in (clean, clean, broken):
        step(torch.ones(3, 4))
    assert_same(state(broken), state(clean))


def test_an_interrupted_step_is_not_resumed_on_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = plain()
    failing = FailingAdd(monkeypatch)
    failing.left, failing.error = 3, KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        broken(torch.ones(3, 4))
    broken.model.load_state_dict(plain().model.state_dict())
    with pytest.raises(OutOfMemoryError, match="with a new TrainStep"):
        broken(torch.ones(3, 4))


class Counting(torch.optim.SGD):
    """Not torch's own: keeps a list in its state."""

    failures = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("norms", []).append(param.norm().item())
        fail_if_told(self)
        super().step()


class Centralizing(torch.optim.SGD):
    """Not torch's own: changes the gradients in place."""

    failures = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.sub_(param.grad.mean()).mul_(2)
        fail_if_told(self)
        super().step()


def fail_if_told(optimizer: Any) -> None:
    if type(optimizer).failures:  # of the class: what the optimizer itself remembers is restored
        type(optimizer).failures -= 1
        raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")


@pytest.mark.parametrize("kind", [Centralizing, Counting])
def test_gradients_and_lists_that_an_optimizer_changes_are_restored_too(kind: Any) -> None:
    steps = []
    for failures in (0, 2):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = kind(model.parameters(), lr=0.1)
        kind.failures = failures
        steps.append(TrainStep(model, optimizer, sum_of_squares))
        steps[-1](torch.ones(3, 4))
        kind.failures = failures
        steps[-1](torch.ones(3, 4))
    assert_same(state(steps[1]), state(steps[0]))
