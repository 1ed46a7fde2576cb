"""Running a script's ranks under the real torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def assert_ranks_pass(script: Path, case: str, world: int, folder: Path) -> None:
    """Run `script case folder` on `world` ranks, each of which is to leave a file done.RANK in the folder."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
        str(script), case, str(folder),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ran.returncode == 0, _why(ran.stderr)
    assert len(list(folder.glob("done.*"))) == world


def _why(stderr: str) -> str:
    """Return the errors of the ranks, without the report of torchrun."""
    return "\n".join(line for line in stderr.splitlines() if line.startswith("[rank") or "Error" in line)
