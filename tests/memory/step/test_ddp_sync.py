"""Ranks of a DistributedDataParallel model survive together: no hang, and the same weights. Under the real torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchrun import RankCases

pytestmark = pytest.mark.long

CASES = {
    2: ("oom", "unused", "static", "forever", "error", "bad batch", "everywhere", "ended", "smaller"),
    4: ("oom", "forever", "ended", "ragged"),
}


@pytest.fixture(scope="module")
def ranks(preloaded_python: None, tmp_path_factory: pytest.TempPathFactory) -> RankCases:
    script = Path(__file__).parents[2] / "support" / "ranks.py"
    return RankCases(script, CASES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("case", "world"), [(case, world) for world, cases in CASES.items() for case in cases])
def test_ranks_have_the_same_weights_after_every_kind_of_failure(ranks: RankCases, case: str, world: int) -> None:
    ranks.assert_passed(case, world)
