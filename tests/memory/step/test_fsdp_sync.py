"""Ranks of a sharded (FSDP2) model survive together: no hang, and the same weights. Under the real torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule
from torchrun import RankCases

pytestmark = pytest.mark.long

RECOVERS = hasattr(FSDPModule, "reset_iter_state")
"""Whether this torch can reset a sharded model after a failure: 2.13 can."""

RECOVERIES = {2: ("everywhere", "first step", "smaller", "cut", "headroom"), 4: ("oom",)}
CASES = {
    2: (
        *("whole", "error", "first error", "bad batch", "ended", "gives up"),
        *(RECOVERIES[2] if RECOVERS else ()),
        "old torch",
    ),
    4: ("whole", *(RECOVERIES[4] if RECOVERS else ())),
}


@pytest.fixture(scope="module")
def ranks(preloaded_python: None, tmp_path_factory: pytest.TempPathFactory) -> RankCases:
    script = Path(__file__).parents[2] / "support" / "sharded.py"
    return RankCases(script, CASES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("case", "world"), [(case, world) for world, cases in CASES.items() for case in cases])
def test_sharded_ranks_train_as_one_process_after_every_kind_of_failure(
    ranks: RankCases, case: str, world: int
) -> None:
    ranks.assert_passed(case, world)
