"""A batch that is opened by a plan is the one that is opened without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.tree import tensors
from penstock.loader.transport import codec
from penstock.loader.transport.arena import Arena
from penstock.loader.transport.envelope_plan import EnvelopePlan, EnvelopePlans

BATCHES: dict[str, Any] = {
    "a tensor": torch.arange(5000),
    "numbers and words": {"x": torch.ones(60, 70), "n": [1, 2.5, None, True, b"b", "word"], "empty": {}},
    "nested": ([torch.ones(5000), (torch.zeros(3), {"y": torch.arange(4.0)})], torch.ones(2, 2)),
    "transposed": [
        torch.arange(6000.0).view(60, 100).t(),
        torch.ones(4, 3, 20, 20).to(memory_format=torch.channels_last),
    ],
    "leaves that require grad": [torch.ones(5000).requires_grad_(), torch.ones(2, 5).requires_grad_(), torch.ones(5)],
    "no elements": {"x": torch.ones(5000), "boxes": torch.empty(0, 4)},
    "0-d, of odd kinds": [
        torch.tensor(5),
        torch.tensor(True),
        torch.ones(5000, dtype=torch.bfloat16),
        torch.ones(1, 5),
    ],
    "small": {"x": torch.ones(3), "y": [torch.zeros(2, dtype=torch.bool)]},
}


def same(one: Any, other: Any) -> bool:
    def about(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.is_leaf

    pairs = [*zip(tensors(one), tensors(other), strict=True)]
    return all(about(a) == about(b) and torch.equal(a, b) for a, b in pairs) and str(one) == str(other)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_a_batch_that_comes_again_is_opened_as_the_first_was(batch: Any) -> None:
    arena, plans = Arena(np.empty(1 << 20, np.uint8)), EnvelopePlans()
    envelope = codec.encode(batch, arena)
    assert plans.of(envelope) is None
    plan = plans.of(bytes(bytearray(envelope)))
    assert plan is not None
    memory = codec.inline_memory(envelope, plan.inline_start) if plan.inline_start else arena.memory
    assert same(plan.open(memory), codec.decode(envelope, arena.memory))
    assert same(plan.open(memory), batch)


def test_batches_of_one_plan_share_nothing_that_can_change() -> None:
    arena = Arena(np.empty(1 << 20, np.uint8))
    plan = EnvelopePlan(codec.encode({"x": torch.ones(5000), "names": ["a", "b"], "more": [[1], torch.ones(2)]}, arena))
    first, second = plan.open(arena.memory), plan.open(arena.memory.copy())
    first["names"].append("c")
    first["more"][0].append(2)
    first["x"].add_(1)
    assert (second["names"], second["more"][0]) == (["a", "b"], [1])
    assert (second["x"] == 1).all()


def test_few_plans_are_kept_whatever_comes() -> None:
    plans = EnvelopePlans()
    for number in range(1000):
        for _ in range(2):
            plans.of(codec.encode([number, torch.ones(3)], None))
    assert len(plans._plans) <= 64
