"""On groups as Megatron's, a run is saved and continued on half and on twice as many ranks, in the same token order."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import effort
import megatron
import pytest
from torchrun import RankCases

pytestmark = pytest.mark.long

WORLDS = dict(zip(megatron.STEPS, (8, 4, 16) if effort.PROFILE == "thorough" else (4, 2, 8), strict=True))


@pytest.fixture(scope="module")
def folder(preloaded_python: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    for shard, (begin, end) in enumerate([(0, 13), (13, 20), (20, 51), (51, megatron.COUNT)]):
        (folder / f"{shard}.jsonl").write_text("".join(f'{{"x": {number}}}\n' for number in range(begin, end)))
    ranks = RankCases(Path(megatron.__file__), {world: [case] for case, world in WORLDS.items()}, folder)
    for case, world in WORLDS.items():
        ranks.assert_passed(case, world)
    return folder


def replicas(folder: Path, name: str, case: str) -> list[list[list[Any]]]:
    """Return what each replica got in each epoch of a case, after checking that all its ranks got the same."""
    world = WORLDS[case]
    ranks = [json.loads((folder / str(world) / f"{name} {case}.{rank}.json").read_text()) for rank in range(world)]
    for first in range(0, world, megatron.TENSOR_PARALLEL):
        assert all(rank == ranks[first] for rank in ranks[first : first + megatron.TENSOR_PARALLEL])
    return ranks[:: megatron.TENSOR_PARALLEL]


@pytest.mark.parametrize("how", ["dcp", "json"])
def test_tokens_come_in_the_order_of_a_run_that_was_never_stopped(folder: Path, how: str) -> None:
    alone = megatron.sequences(1)
    whole = [[(batch["tokens"][0].tolist(), int(batch["noise"][0])) for batch in alone] for _ in range(2)]
    found: list[list[Any]] = [[], []]
    for case in WORLDS:
        for epoch, each in enumerate(zip(*replicas(folder, f"map {how}", case), strict=True)):
            for batches in zip(*each, strict=True):
                # Of the order, each replica has every n-th sample.
                rows = zip(*(zip(tokens, noise, strict=True) for tokens, noise in batches), strict=True)
                found[epoch] += itertools.chain.from_iterable(rows)
    assert [[(tokens, noise) for tokens, noise in epoch] for epoch in found] == whole


@pytest.mark.parametrize("how", ["dcp", "json"])
def test_a_stream_has_each_document_once_in_each_epoch(folder: Path, how: str) -> None:
    found: list[list[int]] = [[], []]
    for case in WORLDS:
        for replica in replicas(folder, f"stream {how}", case):
            for epoch, batches in enumerate(replica):
                found[epoch] += [number for batch in batches if batch is not None for number in batch[0]]
    assert [sorted(epoch) for epoch in found] == [list(range(megatron.COUNT))] * 2
