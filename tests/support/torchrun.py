"""Running cases on ranks under the real torchrun: all cases of one number of ranks in one start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class RankCases:
    """The cases of a script, run as `script FOLDER CASE...` by ranks that note each case that has passed in the folder.

    Args:
        script: what each rank runs.
        cases: by the number of ranks, in the order in which they run.
        folder: an empty one.
    """

    def __init__(self, script: Path, cases: dict[int, Sequence[str]], folder: Path) -> None:
        self._script = script
        self._cases = cases
        self._folder = folder
        self._ran: dict[int, subprocess.CompletedProcess[str]] = {}

    def assert_passed(self, case: str, world: int) -> None:
        """Run the cases of so many ranks, unless that was done, and fail if this one did not pass on each of them."""
        folder = self._folder / str(world)
        if world not in self._ran:
            folder.mkdir()
            self._ran[world] = self._run(world, folder)
        passed = len(list(folder.glob(f"{case}.*")))
        assert passed == world, f"passed on {passed} ranks of {world}; {_why(self._ran[world].stderr)}"
        assert case != self._cases[world][-1] or self._ran[world].returncode == 0, _why(self._ran[world].stderr)

    def _run(self, world: int, folder: Path) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
            str(self._script), str(folder), *self._cases[world],
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def _why(stderr: str) -> str:
    """Return the errors of the ranks, without the report of torchrun."""
    return "\n".join(line for line in stderr.splitlines() if line.startswith("[rank") or "Error" in line)
