"""The examples run, with the same results under plain Python and under penstock."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("preloaded_python")]

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_example_reaches_95_percent_and_the_same_losses_without_penstock(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(EXAMPLES / "make_digits.py")], cwd=tmp_path, check=True, capture_output=True)
    train = [str(EXAMPLES / "train_digits.py"), "--epochs", "3"]
    plain = subprocess.run([sys.executable, *train], cwd=tmp_path, check=True, capture_output=True, text=True)
    under = [sys.executable, "-m", "penstock", "run", "--quiet", *train]
    run = subprocess.run(under, cwd=tmp_path, check=True, capture_output=True, text=True)
    epochs = [line for line in run.stdout.splitlines() if line.startswith("epoch")]
    assert epochs == [line for line in plain.stdout.splitlines() if line.startswith("epoch")]
    found = re.search(r"accuracy ([\d.]+)%", epochs[-1])
    assert found is not None
    assert float(found[1]) > 95


def test_the_plan_in_the_guide_is_what_the_command_prints() -> None:
    command = [sys.executable, "-m", "penstock", "plan", "small_gpt:step", "--budget", "100MiB"]
    printed = subprocess.run(command, cwd=EXAMPLES, check=True, capture_output=True, text=True).stdout.splitlines()
    page = (EXAMPLES.parent / "docs/memory.md").read_text()
    shown = page.partition("penstock plan small_gpt:step --budget 100MiB\n")[2].partition("```")[0].splitlines()
    assert len(shown) > 5
    assert [line for line in shown if line != "  ..." and line not in printed] == []
