"""A compiled model runs out of memory inside of its graphs: the same gradients, and no graph more than it takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._dynamo.utils import counters

from penstock import OutOfMemoryError, TrainStep

SIZE, STEPS, FAILING = 8, 4, 2


class Memory:
    """Room for so many rows, and the operation that finds none."""

    rows: float = math.inf
    failing = 0
    used = 0


def _use(rows: int) -> None:
    Memory.used += 1
    if rows > Memory.rows or Memory.used == Memory.failing:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


@torch.library.custom_op("penstock_tests::held", mutates_args=())
def held(x: Tensor) -> Tensor:
    """Return a copy, if memory has room for it: compiled graphs call this as it is."""
    _use(len(x))
    return x.clone()


@torch.library.custom_op("penstock_tests::held_backward", mutates_args=())
def held_backward(grad: Tensor) -> Tensor:
    """Return a copy in backward."""
    _use(len(grad))
    return grad.clone()


held.register_fake(torch.empty_like)
held_backward.register_fake(torch.empty_like)
held.register_autograd(lambda _, grad: held_backward(grad))


class Net(nn.Module):
    """A block with random numbers and running statistics."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 6), nn.Linear(6, 2)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.chance = 0.4 if norm else 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(held(self.norm(self.inner(x))), self.chance)
        out: Tensor = self.outer(held(torch.tanh(x)))
        return out


@pytest.fixture(autouse=True)
def _reset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.hub.tqdm, "monitor_interval", 0, raising=False)  # a thread that would outlive the test
    torch._dynamo.reset()
    yield
    Memory.rows, Memory.failing, Memory.used = math.inf, 0, 0
    torch._dynamo.reset()
    counters.clear()  # an optimizer's step may be compiled too, where anything is


Batch = tuple[Tensor, Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[0])


def make_step(how: dict[str, Any] | None, *, norm: bool) -> tuple[Net, TrainStep]:
    counters.clear()
    torch.manual_seed(0)
    model = Net(norm=norm)
    if how is not None:
        model.compile(backend="aot_eager", **how)
    return model, TrainStep(model, torch.optim.AdamW(model.parameters()), loss_fn)


def make_batch() -> Batch:
    return torch.randn(SIZE, 3), torch.randint(0, 2, (SIZE,))


def state_of(model: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in (*model.parameters(), *model.buffers())]


def train(how: dict[str, Any] | None, *, norm: bool, failing: int = 0, rows: float = SIZE) -> tuple[list[Tensor], int]:
    """Take some steps, one of which lacks memory; return the end of the model, and the graphs that were compiled."""
    model, step = make_step(how, norm=norm)
    for number in range(STEPS):
        batch = make_batch()
        Memory.used, Memory.failing = 0, failing if number == FAILING else 0
        Memory.rows = rows if number >= FAILING else math.inf
        step(batch)
    failures = 1 if failing else 2 if rows < SIZE else 0
    assert step.statistics().out_of_memory == failures
    return state_of(model), counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("how", [{"fullgraph": True}, {"dynamic": True}], ids=["fullgraph", "dynamic"])
def test_a_failure_inside_of_a_graph_changes_nothing_and_compiles_nothing(how: dict[str, Any]) -> None:
    expected, graphs = train(how, norm=True)
    assert graphs == 1
    for failing in (1, 2, 3, 4):  # two in forward, two in backward
        state, graphs = train(how, norm=True, failing=failing)
        assert all(map(torch.equal, state, expected))
        assert graphs == 0


@pytest.mark.parametrize("how", [{}, {"dynamic": False}], ids=["default", "static"])
def test_smaller_parts_cost_a_compiled_model_one_more_graph_and_not_one_for_each_step(how: dict[str, Any]) -> None:
    expected, _ = train(None, norm=False, rows=SIZE // 2)
    state, graphs = train(how, norm=False, rows=SIZE // 2)
    assert all(map(torch.equal, state, expected))
    assert graphs == 2


def test_where_no_further_graph_may_be_compiled_nothing_has_changed_and_the_error_says_why() -> None:
    model, step = make_step({"fullgraph": True, "dynamic": False}, norm=True)
    with torch._dynamo.config.patch(recompile_limit=1):
        step(make_batch())
        batch = make_batch()
        before, rng = state_of(model), torch.get_rng_state()
        Memory.rows = SIZE // 2
        step = TrainStep(model, step.optimizer, loss_fn, allow_batch_dependent=["BatchNorm1d"])
        with pytest.raises(OutOfMemoryError, match="FailOnRecompileLimitHit") as raised:
            step(batch)
    assert all(map(torch.equal, state_of(model), before))
    assert torch.equal(torch.get_rng_state(), rng)
    assert "compiled for micro-batches of other sizes" in raised.value.__notes__[0]


def test_where_no_further_graph_may_be_compiled_the_model_runs_as_it_is_written() -> None:
    expected, _ = train(None, norm=False, rows=SIZE // 2)
    with torch._dynamo.config.patch(recompile_limit=1):
        state, graphs = train({"dynamic": False}, norm=False, rows=SIZE // 2)
    assert all(map(torch.equal, state, expected))
    assert graphs == 1
