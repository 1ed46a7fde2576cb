"""The peak of one rank is planned as real ranks count it, over gloo, and as torch's own tracker does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrun import RankCases

from penstock import OptionError, plan

CASES = {2: ("fsdp2 checkpointed", "fsdp2 mixed", "ddp")}


@pytest.fixture(scope="module")
def ranks(preloaded_python: None, tmp_path_factory: pytest.TempPathFactory) -> RankCases:
    script = Path(__file__).parents[2] / "support" / "planned.py"
    return RankCases(script, CASES, tmp_path_factory.mktemp("planned"))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("case", "world"), [(case, world) for world, cases in CASES.items() for case in cases])
def test_the_peak_of_a_rank_is_what_real_ranks_count(ranks: RankCases, case: str, world: int) -> None:
    ranks.assert_passed(case, world)


def squares(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().sum(), len(x)


def planned(**options: Any) -> Any:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    return plan(model, options.pop("loss_fn", squares), torch.ones(2, 8), optimizer, budget="1GiB", **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 0}, "ranks must be at least 1, not 0"),
        ({"ranks": 2, "shard": "fsdp"}, "shard is 'fsdp2', 'ddp' or a function of"),
    ],
)
def test_ranks_that_cannot_be_planned_are_refused_with_a_reason(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        planned(**options)


def test_a_process_that_is_a_rank_already_is_refused() -> None:
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with pytest.raises(OptionError, match="this process is one already"):
            planned(ranks=2)
    finally:
        dist.destroy_process_group()


def test_a_step_on_many_ranks_that_depends_on_values_is_refused() -> None:
    def by_value(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        return squares(model, x[x.sum(1) > 0])

    with pytest.raises(OptionError, match=r"does not run on tensors without values.*plan it for one rank"):
        planned(ranks=2, loss_fn=by_value)
    assert planned(loss_fn=by_value).measured


def test_pretending_to_be_a_rank_leaves_nothing_behind() -> None:
    hook, before = sys.excepthook, torch.UntypedStorage.resize_
    found = planned(ranks=4)
    assert found.choice is not None
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    assert torch.UntypedStorage.resize_ is before
    assert found.choice.by_role["weights"] == planned().choice.by_role["weights"] // 4
