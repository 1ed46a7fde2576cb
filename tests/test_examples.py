"""The examples run, with the same results under plain Python and under penstock."""

from __future__ import annotations

import json
import os
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


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_one_rank_stops_both_at_one_step_and_the_next_run_has_what_is_left(
    tmp_path: Path, name: str
) -> None:
    def run(*options: str) -> dict[str, str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        program = [str(EXAMPLES / "preempted.py"), "--folder", str(tmp_path), "--samples", "20000", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ran = subprocess.run([*command, *program], capture_output=True, text=True, env=environment)
        assert ran.returncode == 0, ran.stderr[-3000:]
        return dict(re.findall(r"^rank (\d): (.*)$", ran.stdout, re.MULTILINE))

    first = run("--try", f"1:3:{name}", "--batch-size", "1")  # many steps, so that the run does not end meanwhile
    assert first["0"] == first["1"]
    found = re.fullmatch(r"stopped after step (\d+)", first["0"])
    assert found is not None, first
    step = int(found[1])
    assert step >= 3
    left = 20_000 - 2 * step
    assert run("--batch-size", "500") == dict.fromkeys("01", f"finished after step {step + -(-left // 1000)}")
    seen = [number for path in tmp_path.glob("seen.*") for number in json.loads(path.read_text())]
    assert sorted(seen) == list(range(20_000))
