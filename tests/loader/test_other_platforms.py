"""The loader works where Linux's system calls are absent: inline and with threads. Worker processes are torch's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "other_platform.py"

pytestmark = pytest.mark.usefixtures("preloaded_python")


@pytest.mark.parametrize("platform", ["windows", "macos"])
def test_a_loader_gives_the_same_batches_on(platform: str) -> None:
    done = subprocess.run([sys.executable, PROGRAM, platform], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    batches = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0]]
    assert found["inline"] == found["threads"] == found["workers"] == batches
    assert found["large"] == [[value] * 4 for value in (0.0, 4.0, 8.0)]
    assert found["iterator"] == "torch.utils.data.dataloader"
    assert "worker processes need Linux" in found["reason"]
    assert "this loop has no state" in found["state"]
    assert set(found["refused"]) == {"seed", "errors", "device"}
    assert all(text.startswith(f"{name}= cannot be had") for name, text in found["refused"].items())
    assert found["help"] == 0
