"""Selective checkpointing and outputs without gradients are planned as counted."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import GPT, classify, cnn, images, per_token, tokens

from penstock import plan
from penstock.memory.accounting.byte_counter import ByteCounter
from penstock.memory.cutting.join import join_outputs
from penstock.memory.planning.activation_checkpointing import checkpoint_blocks


def counted(model: nn.Module, loss_fn: Any, batch: Any, optimizer: torch.optim.Optimizer) -> int:
    """Return the most bytes of a second step."""
    counter = ByteCounter()
    counter.watch([*model.parameters(), *model.buffers(), batch], "weights")
    with counter:
        for _ in range(2):
            optimizer.zero_grad()
            gc.collect()
            counter.reset_peak()
            loss_fn(model, batch)[0].backward()
            optimizer.step()
    return counter.peak


def ways(found: Any, **fields: Any) -> Any:
    wanted = {"parts": 1, "checkpoint": False, "selective": False, **fields}
    (one,) = (way for way in found.variants if all(getattr(way, name) == value for name, value in wanted.items()))
    assert sum(one.by_role.values()) == one.peak_nbytes
    return one


def test_selective_checkpointing_is_planned_as_counted() -> None:
    model, batch = GPT(), tokens(4)
    optimizer = torch.optim.AdamW(model.parameters())
    found = plan(model, per_token, batch, optimizer, budget="1GiB", modes=("plain", "selective", "checkpointed"))
    selective = ways(found, checkpoint=True, selective=True)
    assert ways(found, checkpoint=True).peak_nbytes < selective.peak_nbytes < ways(found).peak_nbytes
    assert ways(found).slowdown < selective.slowdown < ways(found, checkpoint=True).slowdown
    checkpoint_blocks(model, selective=True)
    assert selective.peak_nbytes == pytest.approx(counted(model, per_token, batch, optimizer), rel=0.01)


def test_selective_checkpointing_gives_the_same_gradients_and_counts_batch_norm_once() -> None:
    torch.manual_seed(0)
    plain, batch = cnn(), images(4)
    selective = copy.deepcopy(plain)
    assert checkpoint_blocks(selective, selective=True) == 3
    for model in (plain, selective):
        torch.manual_seed(3)
        classify(model, batch)[0].backward()
    for one, other in zip(plain.parameters(), selective.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    for name, value in plain.state_dict().items():
        assert torch.equal(value, selective.state_dict()[name]), name


class Keeping(nn.Module):
    """Allocates a buffer of its own with the first batch, as static caches do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.kept = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32)), torch.zeros(())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if not self.kept.ndim:
            self.kept = torch.zeros(64, 300)
        return {"y": self.layers(x), "x": x * 2}


@pytest.mark.parametrize("parts", [1, 4])
def test_outputs_without_gradients_are_planned_as_counted(parts: int) -> None:
    model, batch = Keeping(), torch.ones(64, 64)
    found = plan(model, lambda model, x: model(x), batch, budget="1GiB", forward_only=True)
    assert {way.by_role["gradients"] for way in found.variants} == {0}

    def forward() -> Any:
        return join_outputs([model(part) for part in batch.chunk(parts)], [64 // parts] * parts)

    counter = ByteCounter()
    counter.watch([*model.parameters(), batch], "weights")
    with counter, torch.no_grad():
        forward()
        counter.reset_peak()
        forward()
    assert ways(found, parts=parts).peak_nbytes == counter.peak


def test_a_storage_that_is_resized_is_counted_with_its_new_size() -> None:
    with ByteCounter() as counter:
        tensor = torch.empty(100)
        tensor.untyped_storage().resize_(0)
        assert counter.live == 0
        tensor.untyped_storage().resize_(4000)
        assert (counter.live, counter.peak) == (4000, 400)
        _ = torch.empty(1)
        assert counter.by_role()["communication"] == 4000
        del tensor
        assert counter.live == 4


def test_the_buffer_of_a_sum_counts_until_the_next_operation() -> None:
    counter = ByteCounter(sum_buffer=lambda rows, columns, itemsize: rows * columns * itemsize)
    with counter:
        matrix = torch.ones(64, 32)
        total = matrix.sum(0)
        assert counter.peak == 2 * matrix.nbytes + total.nbytes == sum(counter.by_role().values())
        row_sums = matrix.sum(1)  # of the fastest dimension: another kernel, which takes none
        assert counter.live == matrix.nbytes + total.nbytes + row_sums.nbytes
        more = matrix.sum(0)
    assert counter.live == matrix.nbytes + total.nbytes + row_sums.nbytes + more.nbytes
