"""torchtitan's trainer saves penstock's loader in its own checkpoints, and goes on with as many ranks and with more."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"),
]

COUNT, GLOBAL_BATCH, SAVED, STEPS = 56, 8, 5, 12


def train(folder: Path, world: int, steps: int, *, tensor: int = 1, pipeline: int = 1) -> list[dict[str, Any]]:
    """Train until step `steps` on so many ranks, `tensor` x `pipeline` for a replica; return what each rank has got."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
        str(Path(__file__).with_name("titan.py")), str(folder), *map(str, (steps, tensor, pipeline)),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads((folder / f"{world}.{steps}.{rank}.json").read_text()) for rank in range(world)]


def orders() -> list[list[int]]:
    """Return the order of the first two epochs, of a loader that nobody has interrupted."""
    loader = penstock.DataLoader(range(COUNT), shuffle=True, seed=1)  # type: ignore[arg-type]
    return [[int(batch) for batch in loader] for _ in range(2)]


def digest_of(indices: list[int], batch_size: int) -> str:
    """Return the digest of a loop that was handed these indices."""
    loader = penstock.DataLoader(range(COUNT), batch_size, sampler=indices)  # type: ignore[arg-type]
    for _ in loader:
        pass
    return loader.statistics().index_digests[-1].digest


def global_batches(ranks: list[dict[str, Any]]) -> list[set[int]]:
    """Return the samples of each step, of all ranks."""
    each = GLOBAL_BATCH // len(ranks)
    steps = len(ranks[0]["seen"]) // each
    return [{one for rank in ranks for one in rank["seen"][step * each : (step + 1) * each]} for step in range(steps)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("titan") / "2"
    folder.mkdir()
    ranks = train(folder, 2, SAVED)
    assert [rank["seen"] for rank in ranks] == [orders()[0][rank::2][: SAVED * 4] for rank in range(2)]
    return folder


@pytest.mark.parametrize("world", [2, 4])
def test_the_order_goes_on_from_torchtitans_checkpoint(saved: Path, tmp_path: Path, world: int) -> None:
    folder = tmp_path / "again"
    shutil.copytree(saved, folder)
    ranks = train(folder, world, STEPS)
    assert global_batches(ranks) == what_is_left()
    in_second = STEPS - COUNT // GLOBAL_BATCH
    each = GLOBAL_BATCH // world
    for number, rank in enumerate(ranks):
        mine = orders()[1][number::world][: in_second * each]
        assert rank["digest"] == [1, in_second, digest_of(mine, each), 0]


def test_tensor_parallel_ranks_get_the_same_and_their_checkpoint_goes_on_without_them(tmp_path: Path) -> None:
    ranks = train(tmp_path, 4, SAVED, tensor=2)
    first, _ = orders()
    assert [rank["seen"] for rank in ranks] == [first[rank // 2 :: 2][: SAVED * 4] for rank in range(4)]
    assert global_batches(train(tmp_path, 4, STEPS)) == what_is_left()


def test_pipeline_stages_get_the_same_and_their_checkpoint_goes_on_without_them(tmp_path: Path) -> None:
    ranks = train(tmp_path, 4, SAVED, pipeline=2)
    first, _ = orders()
    assert [rank["seen"] for rank in ranks] == [first[rank % 2 :: 2][: SAVED * 4] for rank in range(4)]
    assert global_batches(train(tmp_path, 2, STEPS)) == what_is_left()


def what_is_left() -> list[set[int]]:
    """Return the samples of each step after the checkpoint, of all ranks."""
    first, second = orders()
    expected = [*first[SAVED * GLOBAL_BATCH :], *second[: (STEPS - COUNT // GLOBAL_BATCH) * GLOBAL_BATCH]]
    return [{*expected[at : at + GLOBAL_BATCH]} for at in range(0, len(expected), GLOBAL_BATCH)]
