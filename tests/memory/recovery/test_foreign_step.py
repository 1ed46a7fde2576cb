"""A step of an optimizer that is not torch's is copied at first and after a failure, and resumed or refused between."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from nested_equal import assert_same
from torch import Tensor, nn

from penstock.memory.optimizer.foreign_step import ForeignStep
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


class ByNumber(Signs):
    def change(self, p: Any, m: Tensor, lr: float) -> None:
        super().change(p, m, lr / (1 + float(p.norm())))


class Late(Signs):
    """Uses what it has computed from the parameter after that has changed."""

    def change(self, p: Any, m: Tensor, lr: float) -> None:
        before = p.clone()
        super().change(p, m, lr)
        m.add_(before)


class Random(Signs):
    def change(self, p: Any, m: Tensor, lr: float) -> None:
        m.normal_()
        super().change(p, m, lr)


def prepared(kind: Callable[[Any], Own], steps: int) -> tuple[ForeignStep, Own, list[nn.Parameter]]:
    global calls_left, error
    calls_left, error = 0, torch.OutOfMemoryError
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((3, 2), (2,), (4,))]
    optimizer = kind(params)
    whole = ForeignStep(optimizer, FailureLog())
    for _ in range(steps):
        step(whole, params)
    return whole, optimizer, params


def step(whole: ForeignStep, params: list[nn.Parameter]) -> None:
    for number, p in enumerate(params[:2]):
        p.grad = torch.full_like(p, 0.5 + number)
    whole.run()


def state(optimizer: Own) -> Any:
    return copy.deepcopy((optimizer.param_groups, list(optimizer.state.values()), torch.get_rng_state()))


@pytest.mark.parametrize("kind", [Signs, Noisy])
def test_a_failure_anywhere_in_a_step_without_copies_changes_nothing(kind: Callable[[Any], Own]) -> None:
    global calls_left
    clean, optimizer, params = prepared(kind, 4)
    assert clean._copies == []
    before = calls_left
    step(clean, params)
    count = before - calls_left
    step(clean, params)
    expected = state(optimizer)
    assert count == 6
    for number in range(1, count + 1):
        whole, optimizer, params = prepared(kind, 4)
        calls_left = number
        step(whole, params)
        assert whole._log.count == 1
        step(whole, params)
        assert_same(state(optimizer), expected, f"{number}")
        assert whole._copies  # careful from now on


UNPROVEN = [ThroughData, ByNumber, Late, Random]


@pytest.mark.parametrize("kind", UNPROVEN)
def test_a_step_that_cannot_be_proven_is_copied_once_memory_has_run_out_anywhere(kind: Callable[[Any], Own]) -> None:
    global calls_left
    clean, optimizer, params = prepared(kind, 5)
    step(clean, params)
    assert clean._copies == []
    expected = state(optimizer)
    for number in range(1, 7):
        whole, optimizer, params = prepared(kind, 5)
        whole._log.count = 1
        calls_left = number
        with pytest.raises(torch.OutOfMemoryError):
            step(whole, params)
        whole.run()
        assert_same(state(optimizer), expected, f"{number}")


SURVIVED = {ThroughData: [], ByNumber: [1], Late: [1, 4], Random: []}


@pytest.mark.parametrize("kind", UNPROVEN)
def test_the_first_failure_of_a_step_without_proof_or_copy_is_exact_or_refused(kind: Callable[[Any], Own]) -> None:
    global calls_left
    clean, optimizer, params = prepared(kind, 5)
    step(clean, params)
    expected = state(optimizer)
    survived = []
    for number in range(1, 7):
        whole, optimizer, params = prepared(kind, 5)
        calls_left = number
        try:
            step(whole, params)
        except PartialStepError:
            calls_left = 0
            with pytest.raises(PartialStepError, match="interrupted before"):
                whole.run()
            continue
        survived.append(number)
        assert_same(state(optimizer), expected, f"{number}")
        assert whole._is_careful
    assert survived == SURVIVED[kind]


class NeverAlike(Signs):
    """Has another moment in each step."""

    def change(self, p: Any, m: Tensor, lr: float) -> None:
        super().change(p, m, lr)
        self.state[p]["m"] = m.clone()


def test_steps_of_which_none_is_like_another_are_looked_at_no_more_until_one_fails() -> None:
    global calls_left
    whole, optimizer, params = prepared(NeverAlike, 20)
    assert whole._copies == []
    calls_left = 2
    with pytest.raises(PartialStepError, match="it is not known what a step of NeverAlike changes, and it is copied"):
        step(whole, params)
    whole, optimizer, params = prepared(NeverAlike, 20)
    whole._log.count = 1
    calls_left = 2
    with pytest.raises(torch.OutOfMemoryError):
        step(whole, params)
    whole.run()
    _, clean, _ = prepared(NeverAlike, 21)
    assert_same(state(optimizer), state(clean))


def test_an_interrupted_step_is_done_to_its_end_by_the_next_call_and_only_on_the_same_weights() -> None:
    global calls_left, error
    _, optimizer, _ = prepared(Signs, 5)
    expected = state(optimizer)
    for is_changed in (False, True):
        whole, optimizer, params = prepared(Signs, 4)
        calls_left, error = 4, KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            step(whole, params)
        if not is_changed:
            whole.run()
            assert_same(state(optimizer), expected)
            continue
        with torch.no_grad():
            params[0].zero_()
        for _ in range(2):
            with pytest.raises(PartialStepError, match="interrupted before"):
                whole.run()


def test_state_that_was_replaced_or_added_is_copied_again() -> None:
    whole, optimizer, params = prepared(Signs, 4)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(whole, params)
    assert whole._copies
    params[2].grad = torch.ones(4)
    step(whole, params)
    assert len(optimizer.state) == 3
    assert whole._copies


@pytest.fixture
def counts() -> Iterator[dict[str, int]]:
    """The compiler's count of functions, as a test may find it where a model has been compiled."""
    counters = importlib.import_module("torch._dynamo.utils").counters["frames"]
    before = dict(counters)
    yield counters
    counters.clear()
    counters.update(before)
    torch._dynamo.reset()


def halved(x: Tensor) -> Tensor:
    return x * 0.5


def test_a_failure_inside_of_compiled_code_is_refused(counts: dict[str, int]) -> None:
    global calls_left

    class Compiled(Signs):
        def change(self, p: Any, m: Tensor, lr: float) -> None:
            super().change(p, m, lr)
            m.copy_(self.fast(m))

        @staticmethod
        @torch.compile(backend="eager")
        def fast(m: Tensor) -> Tensor:
            if calls_left == 1:
                raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")
            return m * 0.5

    whole, _, params = prepared(Compiled, 4)
    calls_left = 4
    with pytest.raises(PartialStepError, match="not known what a step of Compiled changes"):
        step(whole, params)
