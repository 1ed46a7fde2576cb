"""An optimizer's step that fails in its middle is resumed from every point, and ends as one that did not fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.memory.optimizer import optimizer_state
from penstock.memory.optimizer.optimizer_transaction import StepTransaction
from penstock.memory.optimizer.resume_optimizer import PartialStepError, StepResumption
from penstock.memory.recovery.out_of_memory import FailureLog

PATCHED = [
    (owner, name)
    for owner, names in (
        (torch.Tensor, ["add_", "mul_", "lerp_", "addcmul_", "addcdiv_", "sqrt", "add", "mul", "copy_", "item"]),
        (
            torch,
            [
                "_foreach_add_", "_foreach_mul_", "_foreach_lerp_", "_foreach_addcmul_", "_foreach_addcdiv_",
                "_foreach_sqrt", "_foreach_add", "_foreach_div_", "_foreach_maximum_", "_fused_adamw_", "maximum",
                "_foreach_copy_", "_foreach_mul", "_foreach_sub", "_foreach_neg", "clone",
            ],
        ),
    )
    for name in names
    if hasattr(owner, name)
]  # fmt: skip
"""What optimizers call. Patched and not dispatched: under a dispatch mode steps are retried, not resumed."""


class Calls:
    """Counts the calls of all that is patched, and fails one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.fail_at = 0, -1
        for owner, name in PATCHED:
            monkeypatch.setattr(owner, name, self._failing(getattr(owner, name)))

    def _failing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = self.count
            self.count += 1
            if number == self.fail_at:
                raise torch.OutOfMemoryError(f"tried to allocate 1.00 GiB at call {number}")
            return function(*args, **kwargs)

        return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    return Calls(monkeypatch)


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 4), (4,), (3, 2), (2,))]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    return params


def three_steps(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[StepTransaction, list[nn.Parameter]]:
    params = parameters()
    transaction = StepTransaction(make(params), log=FailureLog())
    for _ in range(3):
        transaction.step()
    return transaction, params


def state(transaction: StepTransaction, params: list[nn.Parameter]) -> list[Tensor]:
    state = transaction.optimizer.state
    held = [value for p in params if p in state for value in state[p].values() if isinstance(value, Tensor)]
    return [tensor.detach().clone() for tensor in (*params, *held)]


FORMS: dict[str, dict[str, Any]] = {"one by one": {"foreach": False}, "foreach": {"foreach": True}}
MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    f"{name}, {form}": lambda p, make=make, options=options: make(p, lr=0.01, **options)
    for form, options in FORMS.items()
    for name, make in {
        "SGD": lambda p, **o: torch.optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=0.1, **o),
        "plain SGD": torch.optim.SGD,
        "Adam": lambda p, **o: torch.optim.Adam(p, weight_decay=0.1, amsgrad=True, **o),
        "AdamW": lambda p, **o: torch.optim.AdamW(p, weight_decay=0.1, **o),
        "RMSprop": lambda p, **o: torch.optim.RMSprop(p, weight_decay=0.1, momentum=0.9, centered=True, **o),
        "NAdam": lambda p, **o: torch.optim.NAdam(p, weight_decay=0.1, **o),
        "Adagrad": lambda p, **o: torch.optim.Adagrad(p, weight_decay=0.1, **o),
    }.items()
}
MAKE["AdamW, fused"] = lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)


@pytest.mark.parametrize("name", MAKE)
def test_a_failure_at_any_call_of_a_later_step_changes_nothing(name: str, calls: Calls) -> None:
    clean, params = three_steps(MAKE[name])
    before = calls.count
    clean.step()
    count, expected = calls.count - before, state(clean, params)
    assert count > 0
    resumed = 0
    for number in range(count):
        transaction, params = three_steps(MAKE[name])
        assert transaction._is_known()
        calls.fail_at = calls.count + number
        try:
            transaction.step()
            resumed += 1
        except torch.OutOfMemoryError:
            transaction.step()  # nothing had changed
        assert all(map(torch.equal, state(transaction, params), expected)), number
    assert resumed > 0 or count <= 2


def test_an_operation_that_would_need_a_lost_value_is_rejected() -> None:
    weight, other = torch.ones(3), torch.ones(3)
    keys = {weight.untyped_storage()._cdata: 1, other.untyped_storage()._cdata: 0}
    weight.mul_(2)  # done before the failure
    resuming = StepResumption(keys, FailureLog())
    with resuming:
        suspect = weight + 1  # was of the weight before
        with pytest.raises(PartialStepError, match="would need what a tensor held before"):
            other.add_(suspect)
        with pytest.raises(PartialStepError, match="would need"):
            suspect[0].item()
        weight.mul_(2)  # left out
        other.add_(weight)  # of the weight after, as the first time
    assert weight.tolist() == [2, 2, 2]
    assert other.tolist() == [3, 3, 3]


def test_a_step_that_does_not_repeat_itself_is_rejected() -> None:
    weight = torch.ones(3)
    key = weight.untyped_storage()._cdata
    resuming = StepResumption({key: 2}, FailureLog())
    with resuming:
        weight.mul_(2)
    with pytest.raises(PartialStepError, match="another one than before"):
        resuming.check([])


def test_a_suspect_result_does_not_get_into_the_optimizers_state() -> None:
    weight = torch.ones(3)
    key = weight.untyped_storage()._cdata
    resuming = StepResumption({key: 1}, FailureLog())
    with resuming:
        buffer = weight.clone()
        weight.mul_(2)
    with pytest.raises(PartialStepError, match="the optimizer's state would need"):
        resuming.check([buffer])


class Interrupting(torch.optim.SGD):
    """Is one of torch's by a test's word, and is interrupted after its first parameter."""

    is_to_interrupt = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad)
                if self.is_to_interrupt:
                    raise KeyboardInterrupt


def test_an_interrupted_step_is_not_taken_from_the_start_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(optimizer_state, "TENSORWISE", frozenset({Interrupting}))
    transaction = StepTransaction(optimizer := Interrupting(parameters(), lr=0.1), log=FailureLog())
    transaction.step()
    optimizer.is_to_interrupt = True
    with pytest.raises(KeyboardInterrupt):
        transaction.step()
    with pytest.raises(PartialStepError, match="interrupted before"):
        transaction.step()
