"""Ranks train on one loader's samples, stop, die and go on, in other numbers. Under the real torchrun, over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import preloaded
import pytest

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("preloaded_python")]

SCRIPT = Path(__file__).with_name("training.py")


ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # With torch 2.13 restarted ranks find the addresses of the dead ones in the agent's store, and gloo cannot connect.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def command(folder: Path, world: int, *arguments: str, **options: Any) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), *arguments]
    return [*torchrun, str(SCRIPT), str(folder), json.dumps(options)]


def torchrun(folder: Path, world: int, *, restarts: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    words = command(folder, world, "--standalone", "--max-restarts", str(restarts), **options)
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, check=False)


def trained(folder: Path, world: int, **options: Any) -> dict[str, Any]:
    """Train, and return the losses and the weights at the end."""
    ran = torchrun(folder, world, **options)
    assert ran.returncode == 0, ran.stderr[-4000:]
    result: dict[str, Any] = json.loads((folder / "result").read_text())
    return result


def shoot(machine: subprocess.Popen[bytes]) -> None:
    """Kill an agent, and so its ranks, as when a machine is switched off."""
    machine.kill()
    machine.wait()


def steps(folder: Path, world: int, attempt: int = 0) -> dict[int, list[int]]:
    """Return the samples of all ranks, by step."""
    found: dict[int, list[int]] = {}
    for rank in range(world):
        for step, samples in json.loads((folder / f"log.{world}.{rank}.{attempt}").read_text()):
            found.setdefault(step, []).extend(samples)
    return {step: sorted(samples) for step, samples in found.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[int, list[int]]]:
    """What four ranks have that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    return trained(folder, 4), steps(folder, 4)


def test_ranks_share_out_each_epoch_in_another_order(whole: tuple[dict[str, Any], dict[int, list[int]]]) -> None:
    seen = whole[1]
    epochs = [[sample for step in range(first, first + 4) for sample in seen[step]] for first in (0, 4)]
    assert len(seen) == 8
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(96))
    assert seen[0] != seen[4]


def test_a_sharded_model_trains_to_the_same_weights(
    whole: tuple[dict[str, Any], dict[int, list[int]]], tmp_path: Path
) -> None:
    result = trained(tmp_path, 2, shard=True)
    assert result["losses"] == pytest.approx(whole[0]["losses"], rel=1e-12)
    assert result["weights"] == pytest.approx(whole[0]["weights"], rel=1e-9)


def test_a_run_resumes_with_other_numbers_of_ranks(
    whole: tuple[dict[str, Any], dict[int, list[int]]], tmp_path: Path
) -> None:
    trained(tmp_path, 4, stop=3)
    parts = [steps(tmp_path, 4)]
    trained(tmp_path, 2, stop=3, workers=2)
    parts.append(steps(tmp_path, 2))
    result = trained(tmp_path, 8, workers=0)
    parts.append(steps(tmp_path, 8))
    assert [[*part] for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert {step: samples for part in parts for step, samples in part.items()} == whole[1]
    assert result["losses"] == pytest.approx(whole[0]["losses"], rel=1e-9)


def test_a_killed_rank_costs_nothing_that_was_saved(
    whole: tuple[dict[str, Any], dict[int, list[int]]], tmp_path: Path
) -> None:
    result = trained(tmp_path, 4, restarts=1, kill=6)
    first, then = steps(tmp_path, 4, 0), steps(tmp_path, 4, 1)
    assert [*first] == [0, 1, 2, 3, 4, 5]
    assert [*then] == [6, 7]
    assert {**first, **then} == whole[1]
    assert result["losses"] == whole[0]["losses"]
    assert result["weights"] == whole[0]["weights"]


def test_a_run_continues_on_the_machines_that_are_left(
    whole: tuple[dict[str, Any], dict[int, list[int]]], tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    meeting = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--max-restarts", "2"]
    quickly = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2"
    machines = []
    for machine in range(2):
        words = command(tmp_path, 2, *meeting, "--rdzv-conf", f"is_host={1 - machine},{quickly}", wait=5)
        with (tmp_path / f"machine.{machine}").open("w") as log:
            own = {**ENVIRONMENT, preloaded.TOGETHER: ""}
            machines.append(subprocess.Popen(words, env=own, stdout=log, stderr=log))
    kept, shot = machines
    try:
        while len([*tmp_path.glob("waits.*")]) < 4:
            assert kept.poll() is None, (tmp_path / "machine.0").read_text()[-3000:]
            time.sleep(0.05)
        shoot(shot)
        assert kept.wait(timeout=100) == 0, (tmp_path / "machine.0").read_text()[-3000:]
    finally:
        for machine in machines:
            shoot(machine)
    first = steps(tmp_path, 4)
    then = [json.loads(path.read_text()) for path in tmp_path.glob("log.2.*")]
    seen = {step: sorted(samples + other) for (step, samples), (_, other) in zip(*then, strict=True)}
    assert [*first] == [0, 1, 2, 3, 4]
    assert [*seen] == [5, 6, 7]
    assert {**first, **seen} == whole[1]
    result = json.loads((tmp_path / "result").read_text())
    assert result["losses"] == pytest.approx(whole[0]["losses"], rel=1e-9)


def test_an_error_of_one_ranks_loader_ends_all_ranks(tmp_path: Path) -> None:
    ran = torchrun(tmp_path, 4, bad=50)
    assert ran.returncode != 0
    assert "ValueError: sample 50 is broken" in ran.stderr
    for rank in range(4):
        assert (
            f"rank {rank} has received: the loader of rank" in ran.stderr
            or f"[rank{rank}]: ValueError: Caught ValueError in DataLoader worker" in ran.stderr
        ), ran.stderr[-3000:]
