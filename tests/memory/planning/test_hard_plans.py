"""Steps that do not run on fake tensors, or not with checkpointed blocks, are planned too, and so is any batch."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import OptionError, PenstockError, TrainStep, plan
from penstock.cli.import_object import call_object


class Block(nn.Module):
    """Keeps what it has seen in a list that the model gives it, as caches of language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(x)
        found: Tensor = self.layer(torch.cat(cache, 1)[:, -x.shape[1] * len(cache) :]).tanh()
        return found.narrow(1, 0, 8) if len(cache) == 1 else found.view(-1, 16)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        cache: list[Tensor] = []
        for block in self.blocks:
            x = block(x, cache)
        return x


def squares(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().sum(), len(x)


def planned(model: nn.Module, batch: Any, loss_fn: Any = squares, **options: Any) -> Any:
    optimizer = torch.optim.Adam(model.parameters())
    return plan(model, loss_fn, batch, optimizer, **{"budget": "1GiB", **options})


def test_a_model_that_fails_with_checkpointed_blocks_is_planned_without_them() -> None:
    found = planned(Cached(), torch.ones(4, 8))
    assert found.choice is not None
    assert not found.measured
    assert not any(variant.checkpoint for variant in found.variants)
    assert any("does not run with its blocks checkpointed, maybe for a cache" in words for words in found.warnings)
    with pytest.raises(Exception, match="shape"):
        planned(Cached(), torch.ones(4, 8), modes=("checkpointed",))


@torch.library.custom_op("penstock_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


doubled.register_autograd(lambda context, gradient: 2 * gradient)


@pytest.mark.parametrize(
    ("through", "words"),
    [
        (doubled, "penstock_tests::doubled"),
        (lambda y: y * float(y.detach().numpy().mean() > -1e9), "numpy"),
    ],
)
def test_an_operator_without_fake_tensors_is_measured_and_reported(
    through: Callable[[Tensor], Tensor], words: str
) -> None:
    found = planned(nn.Linear(8, 8), torch.ones(4, 8), lambda model, x: (through(model(x)).sum(), len(x)))
    assert found.choice is not None
    assert words in found.measured
    assert "so it was measured instead" in found.measured


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_planned_without_compiling_it(in_place: bool) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("compiled")

    model: Any = nn.Linear(8, 8)
    if in_place:
        model.compile(backend=refuse)
    else:
        model = torch.compile(model, backend=refuse)
    found = planned(model, torch.ones(4, 8))
    assert not found.measured
    assert any("planned as if it were not" in words for words in found.warnings)


def test_an_error_in_the_users_code_is_raised_unchanged() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        planned(nn.Linear(8, 8), torch.ones(4, 9))


@dataclass
class Pair:
    x: Tensor
    y: Tensor


def loss_of_pair(model: nn.Module, pair: Any) -> tuple[Tensor, int]:
    x, y = (pair["x"], pair["y"]) if isinstance(pair, Mapping) else (pair.x, pair.y)
    return (model(x) - y).square().sum(), len(x)


@pytest.mark.parametrize("kind", [Pair, lambda x, y: UserDict({"x": x, "y": y})])
def test_the_bytes_of_any_batch_are_counted(kind: Callable[[Tensor, Tensor], Any]) -> None:
    found = planned(nn.Linear(8, 8), kind(torch.ones(64, 8), torch.ones(64, 8)), loss_of_pair)
    assert all(variant.by_role["inputs"] == 2 * 64 * 8 * 4 for variant in found.variants)
    assert not found.measured


class Opaque:
    """A batch that only its owner can cut and count."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_a_plan_uses_the_users_split_and_batch_size() -> None:
    model = nn.Linear(8, 8)
    step = TrainStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: squares(model, batch.x),
        micro_batch="auto",
        budget="1GiB",
        split=lambda batch, parts: [Opaque(x) for x in batch.x.chunk(parts)],
        batch_size=lambda batch: len(batch.x),
    )
    step(Opaque(torch.ones(4, 8)))
    assert step.statistics().micro_batch == 4


@pytest.mark.parametrize("budget", [0, -5, "0GiB", "many"])
def test_a_budget_that_is_not_a_size_is_rejected(budget: Any) -> None:
    with pytest.raises(OptionError):
        planned(nn.Linear(8, 8), torch.ones(4, 8), budget=budget)


def test_an_optimizer_with_a_closure_is_rejected_with_a_reason() -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(OptionError, match="LBFGS evaluates the loss by itself"):
        plan(model, squares, torch.ones(4, 8), torch.optim.LBFGS(model.parameters()), budget="1GiB")


def test_a_name_that_is_not_a_function_is_rejected() -> None:
    with pytest.raises(PenstockError, match="os:sep must be a function, not str"):
        call_object("os:sep")
