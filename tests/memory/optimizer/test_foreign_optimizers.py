"""An optimizer that is not torch's and fails in its middle ends as if it had not, wherever it keeps its state."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from nested_equal import assert_same
from torch import Tensor, nn

from penstock import OutOfMemoryError, TrainStep

pytestmark = pytest.mark.filterwarnings("ignore:is_short is changed by loss_fn")

failures_left = 0
is_short = False
"""Whether memory runs out in the next forward."""


def may_fail() -> None:
    """Fail as an allocation in the middle of a step would."""
    global failures_left
    failures_left -= 1
    if failures_left == 0:
        raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")


class Foreign(torch.optim.Optimizer):
    """Fails between any two parameters. Subclasses keep what they remember where others do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.direction(p, group))
                may_fail()

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class InLists(Foreign):
    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        moments = state.setdefault("moments", [torch.zeros_like(p), [torch.zeros_like(p)]])
        moments[0].add_(p.grad)
        moments[1][0].mul_(0.5).add_(moments[0])
        state.setdefault("history", deque(maxlen=2)).append(p.grad.clone())
        return moments[1][0] + sum(state["history"])


class InDicts(Foreign):
    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        buffers = self.state[p].setdefault("buffers", {0.9: torch.zeros_like(p), 0.5: torch.zeros_like(p)})
        for beta, buffer in buffers.items():
            buffer.mul_(beta).add_(p.grad)
        return buffers[0.9] + buffers[0.5]


class InGroups(Foreign):
    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        group.setdefault("d", torch.ones(())).mul_(1.5)
        group["k"] = group.get("k", 0) + 1
        return p.grad * group["d"] / group["k"]


class InAttributes(Foreign):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.mean = torch.zeros(())
        self.array = np.ones(2)
        self.generator = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(3)
        self.tracker = Tracker()
        self.count = 0

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        self.mean.add_(p.grad.mean())
        self.array *= 1.25
        self.count += 1
        self.tracker.norm = self.tracker.norm + p.grad.norm()
        noise = torch.randn(p.shape, generator=self.generator) + float(self.numpy.normal()) + torch.randn(p.shape)
        p.seen = getattr(p, "seen", 0) + 1  # type: ignore[attr-defined]
        return p.grad + self.mean * float(self.array[0]) + noise + self.tracker.norm / self.count + p.seen  # type: ignore[attr-defined]


class Tracker:
    __slots__ = ("norm",)

    def __init__(self) -> None:
        self.norm = torch.zeros(())


class UnderNoParameter(Foreign):
    """Keeps a state that belongs to no parameter, and changes gradients."""

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        common = self.state.setdefault("common", {"norm": torch.zeros(())})  # type: ignore[call-overload]
        common["norm"].add_(p.grad.norm())
        p.grad.mul_(0.5)
        p.grad = p.grad / (1 + common["norm"])
        return p.grad


class InClosure(Foreign):
    """Keeps what it remembers in a function's closure."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        moments: dict[Tensor, Tensor] = {}
        calls = 0

        def moved(p: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            moment = moments.setdefault(p, torch.zeros_like(p))
            return moment.mul_(0.9).add_(p.grad) / calls

        self.moved = moved

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return self.moved(p)


class Wrapper(torch.optim.Optimizer):
    """Has another optimizer inside, its groups as a property, and slow weights."""

    def __init__(self, params: Any) -> None:
        self.inner = InDicts(params)
        self.slow = [p.detach().clone() for group in self.inner.param_groups for p in group["params"]]
        self.defaults = self.inner.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}  # type: ignore[assignment]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
            slow.lerp_(p, 0.5)
            may_fail()
            p.copy_(slow)


class Scheduled(InDicts):
    """Has an optimizer of a parameter that is not the model's, to have a schedule."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.clock = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.clock, 0.5)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.clock.step()
        self.schedule.step()
        self.param_groups[0]["lr"] = self.clock.param_groups[0]["lr"]
        super().step()


class Container(torch.optim.Optimizer):
    """Has one optimizer per parameter, the groups of all, and no state."""

    def __init__(self, params: Any) -> None:
        every = list(params)
        self.optimizers = [InLists([p]) for p in every]
        super().__init__(every, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()


FOREIGN = [InLists, InDicts, InGroups, InAttributes, UnderNoParameter, InClosure, Wrapper, Scheduled, Container]


def sum_of_squares(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    global is_short
    if is_short:
        is_short = False
        raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")
    return model(batch).square().sum(), len(batch)


def trained(make: Callable[[Any], Any], fail_in: int = 0, fail_at: int = 0) -> tuple[dict[str, Any], int]:
    """Return the weights after three steps, one of which fails, and how often the first could have."""
    global failures_left, is_short
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    step = TrainStep(model, make(model.parameters()), sum_of_squares, clip_grad_norm=1.0)
    asked = 0
    for number in range(3):
        is_short = number == 1
        failures_left = fail_at if number == fail_in else 0
        step(torch.full((2, 3), float(number + 1)))
        asked = asked or -failures_left
    return copy.deepcopy(model.state_dict()), asked


@pytest.mark.parametrize("make", FOREIGN)
def test_a_failure_anywhere_in_a_foreign_optimizer_changes_no_weight(make: Callable[[Any], Any]) -> None:
    expected, count = trained(make)
    assert count >= 4
    for number in range(1, count + 1):
        for fail_in in (0, 1):
            assert_same(trained(make, fail_in, number)[0], expected, f"{number}")


class InIterator(Foreign):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.steps = itertools.count(1)

    def direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad / next(self.steps)


def test_an_optimizer_whose_state_cannot_be_copied_is_named_when_it_fails() -> None:
    assert trained(InIterator)[1] == 4
    with pytest.raises(OutOfMemoryError, match=r"InIterator keeps things that cannot be copied: count.*checkpoint"):
        trained(InIterator, 1, 2)
