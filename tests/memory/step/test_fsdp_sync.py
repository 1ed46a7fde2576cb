"""Ranks of a sharded (FSDP2) model survive together: no hang, and the same weights. Under the real torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torchrun import assert_ranks_pass

pytestmark = pytest.mark.usefixtures("preloaded_python")

RECOVERS = hasattr(FSDPModule, "reset_iter_state")


@pytest.mark.parametrize(
    ("case", "world"),
    [
        *((case, 2) for case in ("whole", "error", "first error", "bad batch", "ended", "gives up", "old torch")),
        ("whole", 4),
        *(
            pytest.param(case, world, marks=pytest.mark.skipif(not RECOVERS, reason=f"torch {torch.__version__}"))
            for case, world in (
                ("everywhere", 2), ("first step", 2), ("smaller", 2), ("cut", 2), ("oom", 4), ("headroom", 2),
            )
        ),
    ],
)  # fmt: skip
def test_sharded_ranks_train_as_one_process_after_every_kind_of_failure(case: str, world: int, tmp_path: Path) -> None:
    assert_ranks_pass(Path(__file__).parents[2] / "support" / "sharded.py", case, world, tmp_path)
