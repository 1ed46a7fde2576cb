"""Ranks of a DistributedDataParallel model survive together: no hang, and the same weights. Under the real torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchrun import assert_ranks_pass

pytestmark = pytest.mark.usefixtures("preloaded_python")


@pytest.mark.parametrize(
    ("case", "world"),
    [
        *(
            (case, 2)
            for case in ("oom", "unused", "static", "forever", "error", "bad batch", "everywhere", "ended", "smaller")
        ),
        *((case, 4) for case in ("oom", "forever", "ended", "ragged")),
    ],
)
def test_ranks_have_the_same_weights_after_every_kind_of_failure(case: str, world: int, tmp_path: Path) -> None:
    assert_ranks_pass(Path(__file__).parents[2] / "support" / "ranks.py", case, world, tmp_path)
