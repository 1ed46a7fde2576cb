"""Ranks of a DistributedDataParallel model survive together: no hang, and the same weights. Under the real torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


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
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
        str(HERE / "ranks.py"), case, str(tmp_path),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ran.returncode == 0, _why(ran.stderr)
    assert len(list(tmp_path.glob("done.*"))) == world


def _why(stderr: str) -> str:
    """Return what the ranks said, without what torchrun says of them."""
    return "\n".join(line for line in stderr.splitlines() if line.startswith("[rank") or "Error" in line)
