"""What a failed attempt changed is put back, wherever a model keeps it, and named, where it belongs to nobody."""

from __future__ import annotations

import copy
import functools
import re
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from nested_equal import assert_same
from scarcity import FailAt
from torch import Tensor, nn

from penstock import OptionError, OutOfMemoryError, TrainStep
from penstock.memory.recovery.snapshot import WatchedState

total_calls = 0
history: list[float] = []


class Stateful(nn.Module):
    """Carries a hidden state over, counts, keeps a queue, and draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.hidden = torch.zeros(4)
        self.calls = 0
        self.queue: deque[Tensor] = deque(maxlen=2)
        self.stats = {"seen": [0]}
        self.generator = torch.Generator().manual_seed(1)
        self.numpy = np.random.default_rng(1)
        self.array = np.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.stats["seen"].append(self.calls)
        self.array += 1
        noise = torch.randn(4, generator=self.generator) + float(self.numpy.normal()) + float(self.array[0])
        out: Tensor = self.layer(x) + self.hidden + noise + sum(self.queue) + len(self.stats["seen"])
        self.hidden = out.detach().mean(0)
        self.queue.append(self.hidden * 2)
        return torch.tanh(out)


def squares(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().sum(), len(x)


def counting(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    global total_calls
    total_calls += 1
    history.append(total_calls)
    return model(x).square().sum() * (1 + len(history)), len(x)


def in_a_closure() -> Callable[..., Any]:
    calls, seen, teacher = 0, {"x": 0.0}, nn.Sequential(Stateful(), nn.BatchNorm1d(4))
    total = torch.zeros(())

    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        nonlocal calls
        calls += 1
        seen["x"] += 1
        with torch.no_grad():
            target = teacher(x) + total
            total.add_(target.mean())
            target += teacher[1].running_mean
        return (model(x) - target * calls).square().sum() * seen["x"], len(x)

    return loss_fn


class Trainer:
    """Has the loss as a method."""

    def __init__(self) -> None:
        self.calls, self.metrics = 0, []  # type: ignore[var-annotated]

    def loss(self, scale: float, model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        self.calls += 1
        self.metrics.append(scale)
        return model(x).square().sum() * self.calls * len(self.metrics), len(x)


LOSSES: dict[str, tuple[Callable[[], Callable[..., Any]], str]] = {
    "globals": (lambda: counting, r"total_calls is changed by .*test_snapshot.py:\d+: total_calls \+= 1"),
    "a list": (lambda: counting, r"history is changed by .*history\.append\(total_calls\)"),
    "a closure": (in_a_closure, r"calls is changed by .*calls \+= 1"),
    "a teacher": (in_a_closure, r"teacher is changed by .*target = teacher\(x\)"),
    "a method": (lambda: functools.partial(Trainer().loss, 1.0), "an attribute of a Trainer is changed by"),
    "a default": (lambda: with_a_default(), r"seen is changed by .*seen\[\"n\"\] \+= 1"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("step_number", [0, 2])
def test_what_changes_outside_of_a_model_is_named_once_after_a_failure(name: str, step_number: int) -> None:
    make_loss, words = LOSSES[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trained(make_loss, step_number, [20])
    assert sum(bool(re.search(words, str(one.message))) for one in seen) == 1, [str(one.message) for one in seen]


def test_what_does_not_change_outside_of_a_model_is_not_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(lambda: squares, 2, [20])


def trained(make_loss: Callable[[], Callable[..., Any]], step_number: int, fail_at: list[int]) -> tuple[Any, int]:
    """Return the weights after three steps, of which one fails, and how many operations that one had."""
    global total_calls
    total_calls = 0
    history.clear()
    torch.manual_seed(0)
    model, batches, count = Stateful(), [torch.full((3, 4), 1.0 + number) for number in range(3)], 0
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.01), make_loss())
    for number, batch in enumerate(batches):
        with FailAt(fail_at if number == step_number else ()) as failing:
            step(batch)
        count = failing.count if number == step_number else count
    return copy.deepcopy((model.state_dict(), model.hidden, model.calls, model.stats)), count


@pytest.mark.parametrize("step_number", [0, 2])
def test_a_failure_anywhere_leaves_no_trace_in_what_a_model_remembers(step_number: int) -> None:
    expected, count = trained(lambda: squares, step_number, [])
    for number in range(0, count, 4):
        assert_same(trained(lambda: squares, step_number, [number])[0], expected, f"{number}")


def test_what_a_window_has_replaced_is_not_kept_alive() -> None:
    model = Stateful()
    watched = WatchedState([model])
    references = []
    for _ in range(9):
        watched.save()
        model.hidden.add_(1)
        references.append(weakref.ref(model.hidden))
        model.hidden = torch.zeros(4)
        watched.learn()
        watched.discard()
    assert sum(reference() is not None for reference in references) <= 1


class Contrast(nn.Module):
    """Has a second encoder, whose weights follow those of the first in place, as MoCo's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for p, q in zip(self.first.parameters(), self.second.parameters(), strict=True):
                q.lerp_(p, 0.5)
            key = self.second(x)
        found: Tensor = self.first(x) - key
        return found


def contrasted(step_number: int, fail_at: list[int], *, is_said: bool) -> tuple[Any, int]:
    torch.manual_seed(0)
    model, batches, count = Contrast(), [torch.full((3, 4), 1.0 + number) for number in range(2)], 0
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.01)
    step = TrainStep(model, optimizer, squares, also=[model.second] if is_said else [])
    for number, batch in enumerate(batches):
        with FailAt(fail_at if number == step_number else ()) as failing:
            step(batch)
        count = failing.count if number == step_number else count
    return copy.deepcopy(model.state_dict()), count


@pytest.mark.parametrize(("step_number", "is_said"), [(1, False), (0, True), (1, True)])
def test_parameters_that_a_model_changes_in_place_are_put_back(step_number: int, is_said: bool) -> None:
    expected, count = contrasted(step_number, [], is_said=is_said)
    for number in range(0, count, 3):
        assert_same(contrasted(step_number, [number], is_said=is_said)[0], expected, f"{number}")


_WHERE = r"had changed second\.(weight|bias) in place.*also="


def test_a_change_in_place_that_was_never_seen_before_is_an_error_with_the_parameter() -> None:
    _, count = contrasted(0, [], is_said=False)
    with pytest.raises(OutOfMemoryError, match=_WHERE):
        contrasted(0, [count // 2], is_said=False)


def test_another_error_is_raised_with_a_note_of_what_cannot_be_put_back() -> None:
    model = Contrast()

    def failing(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        model(x)
        raise ValueError("not a number")

    step = TrainStep(model, torch.optim.SGD(model.first.parameters(), lr=0.01), failing)
    with pytest.raises(ValueError, match="not a number") as caught:
        step(torch.ones(3, 4))
    assert "had changed second.weight in place" in caught.value.__notes__[0]


class Average:
    """A metric with a state_dict, in no container that is looked into."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total = state["total"]


@pytest.mark.filterwarnings("error")
def test_objects_generators_and_modules_beside_the_model_are_put_back() -> None:
    def run(fail_at: list[int]) -> tuple[Any, int]:
        torch.manual_seed(0)
        model, judge, metric = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), Average()
        chance = torch.Generator().manual_seed(2)
        hidden = (judge, metric, chance)  # in a tuple, in no name of the loss

        def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
            hidden[1].total += 1
            noise = torch.randn(4, generator=hidden[2])
            return (hidden[0](model(x)) * hidden[1].total + noise).square().sum(), len(x)

        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, also=[judge, metric, chance])
        batch = torch.arange(12.0).view(3, 4)
        with FailAt(fail_at) as failing:
            step(batch)
        grads = [p.grad for p in judge.parameters()]
        return copy.deepcopy((model.state_dict(), judge.state_dict(), grads, metric.total)), failing.count

    expected, count = run([])
    for number in range(0, count, 4):
        assert_same(run([number])[0], expected, f"{number}")


def test_what_cannot_be_put_back_is_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(OptionError, match="also= takes modules, generators, and objects with state_dict"):
        TrainStep(model, torch.optim.SGD(model.parameters()), squares, also=[3])


class MovesItsKeys(nn.Module):
    """Moves frozen weights towards others through `.data`, as MoCo's code does: no version counter tells."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for mine, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
            mine.data = mine.data * 0.9 + other.data * 0.1
        out: Tensor = (self.query(x) * self.key(x)).tanh()
        return out


def with_a_default() -> Callable[..., Any]:
    seen = {"n": 0}

    def inner(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        seen["n"] += 1
        return model(x).square().sum() * seen["n"], len(x)

    def loss_fn(model: nn.Module, x: Tensor, inner: Callable[..., Any] = inner) -> Any:
        return inner(model, x)

    return loss_fn


def test_weights_that_are_moved_through_data_are_put_back() -> None:
    def trained(*fail_at: int) -> Any:
        torch.manual_seed(0)
        model = MovesItsKeys()
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), squares)
        batches = [torch.randn(3, 4) for _ in range(4)]
        losses = [step(batch) for batch in batches[:2]]
        failing = FailAt(fail_at)
        with failing:
            losses.append(step(batches[2]))
        losses.append(step(batches[3]))
        return (model.state_dict(), losses), failing.count

    expected, operations = trained()
    for fail_at in range(operations):
        assert_same(trained(fail_at)[0], expected)


def test_weights_that_were_changed_through_data_before_anybody_had_looked_are_refused() -> None:
    model = MovesItsKeys()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), squares)
    calls: list[int] = []

    def fail_once(*_: object) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model.query.register_forward_hook(fail_once)
    with pytest.raises(OutOfMemoryError, match=r"had changed key\.weight in place"):
        step(torch.randn(3, 4))
