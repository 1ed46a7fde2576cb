"""The examples run, with the same results under plain Python and under penstock."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import effort
import pytest
from slurm import JOB, Slurm

import penstock

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
    page = (EXAMPLES.parent / "docs/plan.md").read_text()
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


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # short, for a socket's name
        cluster = Slurm(Path(folder))
        yield cluster
        cluster.close()


def job_of_the_page(tmp_path: Path, port: int, *, torchrun: bool) -> Path:
    """Write the job script of examples/preempted.py, with one process on each of two nodes and more samples."""
    page = ast.get_docstring(ast.parse((EXAMPLES / "preempted.py").read_text())) or ""
    *_, job, _, srun = (textwrap.dedent(part) for part in page.split("\n\n"))
    assert job.startswith("#!/bin/bash\n")
    assert srun.count("srun") == 1
    if not torchrun:
        job = re.sub(r"(?s)srun torchrun.*?&\n", lambda _: srun + "\n", job)
    program = f"{EXAMPLES / 'preempted.py'} --samples 20000 --batch-size 1 --try 0:3:SIGSTOP"
    for word, instead in (
        ("examples/preempted.py", program), ("--nproc-per-node 8", "--nproc-per-node 1"), ("29500", str(port))
    ):  # fmt: skip
        assert word in job or "nproc" in word
        job = job.replace(word, instead)
    path = tmp_path / "job.sh"
    path.write_text(job)
    return path


def stopped_in(folder: Path) -> int:
    """Return the process in `folder` that has stopped itself, when there is one."""
    while True:
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = entry.joinpath("stat").read_text().rpartition(")")[2].split()[0]
                if state == "T" and os.readlink(entry / "cwd") == str(folder):
                    return int(entry.name)
        time.sleep(0.05)


@pytest.mark.parametrize(
    "torchrun",
    [
        pytest.param(True, id="srun torchrun"),
        pytest.param(
            False,
            id="srun python",
            marks=pytest.mark.skipif(effort.PROFILE != "thorough", reason="starts Pythons of its own: make thorough"),
        ),
    ],
)
def test_the_job_for_slurm_on_the_page_stops_saves_and_continues_when_it_is_queued_again(
    tmp_path: Path, slurm: Slurm, torchrun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    job, log = job_of_the_page(tmp_path, port, torchrun=torchrun), tmp_path / "log"
    running = slurm.sbatch(job, log)
    rank = stopped_in(tmp_path)  # after two whole steps, so that all ranks watch for signals
    os.kill(rank, signal.SIGCONT)
    running.send_signal(signal.SIGUSR1)
    assert running.wait() == 0, log.read_text()
    assert slurm.requeued == [JOB], log.read_text()
    said = log.read_text()
    (step,) = {int(found) for found in re.findall(r"^rank \d: stopped after step (\d+)$", said, re.MULTILINE)}
    order = [int(sample) for sample in penstock.DataLoader(range(20_000), shuffle=True, seed=0)]  # type: ignore[arg-type]
    assert seen(tmp_path, step) == [order[rank : 2 * step : 2] for rank in (0, 1)]
    if not torchrun:
        return  # the second run has nothing more of it, and Python starts twice as slowly as under torchrun
    job.write_text(job.read_text().replace("--batch-size 1", "--batch-size 500"))
    assert slurm.sbatch(job, log).wait() == 0, log.read_text()
    assert slurm.requeued == [JOB]  # not once more
    last = step + -(-(20_000 - 2 * step) // 1000)
    rest = [sample for samples in seen(tmp_path, last) for sample in samples]
    assert sorted(rest) == sorted(order[2 * step :])


def seen(folder: Path, step: int) -> list[list[int]]:
    """Return the samples of both ranks in the run that ended after this step."""
    files = [folder / f"preempted/seen.{step}.{rank}.json" for rank in (0, 1)]
    return [json.loads(file.read_text()) for file in files]
