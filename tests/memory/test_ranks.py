"""Ranks of a DistributedDataParallel model survive together: no hang, and the same weights. Under the real torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchrun import assert_ranks_pass


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
def test_ranks_stay_together(case: str, world: int, tmp_path: Path) -> None:
    assert_ranks_pass(Path(__file__).with_name("ranks.py"), case, world, tmp_path)
