"""Under the real torchrun there is one report for all ranks, and no rank is waited for."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launch.programs import python, script
from scripts import written

from penstock.observe.record import run_record
from penstock.observe.report import text_report

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("preloaded_python")]

TRAINING = """
    import os, signal, sys, time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    rank, ending = dist.get_rank(), sys.argv[1]
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(dataset)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=1):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.1 if ending == "killed" else 0)
        if rank == 0:
            print(epoch, loss.item(), flush=True)
        if rank == 1 and epoch == 1 and ending == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and ending == "raises":
        raise ValueError("of rank 1")
    dist.destroy_process_group()
"""
ALONE = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def torchrun(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return python(folder, *words, *command, **ALONE)


def saved(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(written(folder).read_text())
    return data


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("-m", "penstock", "run"), id="torchrun -m penstock run"),
        pytest.param(("--no-python", sys.executable, "-m", "penstock", "run"), id="torchrun --no-python"),
    ],
)
def test_two_ranks_make_one_report(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = script(tmp_path, TRAINING)
    plain = torchrun(tmp_path, path.name, "well")
    run = torchrun(tmp_path, *command, path.name, "well")
    assert plain.returncode == 0, plain.stderr
    assert (run.stdout, run.returncode) == (plain.stdout, 0), run.stderr
    assert run.stderr.count("penstock: train.py well ran") == 1
    assert "all ranks: 192 samples" in run.stderr
    assert "TensorDataset: 2 ranks have 2 shares of the samples, and were handed each other indices" in run.stderr
    data = saved(tmp_path)
    assert [(rank["rank"], rank["samples"], rank["exit_code"], rank["missing_reason"]) for rank in data["ranks"]] == [
        (0, 96, 0, ""),
        (1, 96, 0, ""),
    ]
    assert {loader["rank"] for loader in data["loaders"]} == {0, 1}
    assert data["totals"]["batches"] == data["timeline"][-1]["batches"] == 48


def test_a_rank_that_raises_is_named_and_the_other_is_not_waited_for(tmp_path: Path) -> None:
    path = script(tmp_path, TRAINING)
    run = torchrun(tmp_path, "-m", "penstock", "run", path.name, "raises")
    assert run.returncode == 1
    assert "ValueError: of rank 1" in run.stderr
    data = saved(tmp_path)
    assert data["exit"] == {"code": 1, "error": "rank 1: ValueError: of rank 1"}
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1]


def test_ranks_that_are_killed_are_named_and_what_they_counted_is_kept(tmp_path: Path) -> None:
    path = script(tmp_path, TRAINING)
    run = torchrun(tmp_path, "-m", "penstock", "run", path.name, "killed")
    assert run.returncode == 1
    while not list(tmp_path.glob("penstock-runs/*/run.json")):  # by a supervisor, when torchrun may have ended
        time.sleep(0.05)
    data = saved(tmp_path)
    assert "killed" in data["ranks"][1]["missing_reason"]
    assert data["ranks"][1]["batches"] > 0
    assert "rank 1: " in text_report.render(run_record.load(written(tmp_path)))


def test_a_baseline_of_several_ranks_is_refused(tmp_path: Path) -> None:
    run = torchrun(tmp_path, "-m", "penstock", "run", "--baseline", script(tmp_path, TRAINING).name, "well")
    assert "--baseline compares one process" in run.stderr
    assert run.returncode != 0
