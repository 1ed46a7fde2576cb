"""Whatever is in a file, reading it ends, and with nothing but the documented errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.data.format_registry import FORMATS

pytestmark = pytest.mark.usefixtures("preloaded_python")

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", [one.name for one in FORMATS])
def test_mutants_are_read_or_refused(name: str) -> None:
    command = [sys.executable, "-m", "benchmarks.fuzz", "--formats", name, "--count", "250"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
