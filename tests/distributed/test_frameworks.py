"""Programs of other libraries save a loader on two ranks and go on, on two and on one. Under the real torchrun."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import frameworks
import pytest
from torchrun import RankCases

pytestmark = [
    pytest.mark.long,
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
        for name in ("accelerate", "lightning")
    ),
]


@pytest.fixture(scope="module")
def ranks(preloaded_python: None, tmp_path_factory: pytest.TempPathFactory) -> RankCases:
    return RankCases(Path(frameworks.__file__), {2: [*frameworks.CASES]}, tmp_path_factory.mktemp("frameworks"))


def test_a_stream_that_accelerate_shares_out_is_not_shared_out_twice(ranks: RankCases) -> None:
    ranks.assert_passed("accelerate_stream", 2)


@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_a_checkpoint_of_two_ranks_goes_on_with_the_batches_that_were_left(ranks: RankCases, name: str) -> None:
    ranks.assert_passed(name, 2)
