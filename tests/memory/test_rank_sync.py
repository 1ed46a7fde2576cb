"""Ranks of a parallel model survive together: no hang, and the same weights. Under the real torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule
from torchrun import RankCases

pytestmark = pytest.mark.long

RECOVERS = hasattr(FSDPModule, "reset_iter_state")
"""Whether this torch can reset a sharded model after a failure: 2.13 can."""

REPLICATED = {
    2: ("oom", "unused", "static", "forever", "error", "bad batch", "everywhere", "ended", "smaller"),
    4: ("oom", "forever", "ended", "ragged"),
}
SHARDED = {
    2: (
        *("whole", "error", "first error", "bad batch", "ended", "gives up"),
        *(("everywhere", "first step", "smaller", "cut") if RECOVERS else ()),
        "old torch",
    ),
    4: ("whole", *(("oom",) if RECOVERS else ())),
}
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def replicated(preloaded_python: None, tmp_path_factory: pytest.TempPathFactory) -> RankCases:
    return RankCases(SUPPORT / "ranks.py", REPLICATED, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def sharded(preloaded_python: None, tmp_path_factory: pytest.TempPathFactory) -> RankCases:
    return RankCases(SUPPORT / "sharded.py", SHARDED, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("case", "world"), [(case, world) for world, cases in REPLICATED.items() for case in cases])
def test_ranks_have_the_same_weights_after_every_kind_of_failure(replicated: RankCases, case: str, world: int) -> None:
    replicated.assert_passed(case, world)


@pytest.mark.parametrize(("case", "world"), [(case, world) for world, cases in SHARDED.items() for case in cases])
def test_sharded_ranks_train_as_one_process_after_every_kind_of_failure(
    sharded: RankCases, case: str, world: int
) -> None:
    sharded.assert_passed(case, world)
