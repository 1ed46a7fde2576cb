"""Loaders of several ranks agree on what each of them gets, also after a checkpoint. Under the real torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import loading
import meshes
import numpy as np
import pytest
import torch.distributed.checkpoint as dcp
from torchrun import RankCases

pytestmark = pytest.mark.long

CASES = {4: [*loading.CASES]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loading")
    for shard, (begin, end) in enumerate([(0, 13), (13, 20), (20, 31), (31, loading.COUNT)]):
        lines = [json.dumps({"x": number}) for number in range(begin, end)]
        (folder / f"{shard}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    documents = [[*range(1, length), 0] for length in (4, 30, 3, 10, 25, 7, 40, 12, 9, 5) * 2]
    np.concatenate(documents).astype(np.uint16).tofile(folder / "tokens.bin")
    return folder


@pytest.fixture(scope="module")
def ranks(preloaded_python: None, folder: Path) -> RankCases:
    return RankCases(Path(loading.__file__), CASES, folder)


@pytest.mark.parametrize("kind", [*loading.LOADERS])
def test_ranks_of_one_replica_get_the_same_batches(ranks: RankCases, kind: str) -> None:
    ranks.assert_passed(f"mesh {kind}", 4)


def test_ranks_of_one_replica_get_the_same_order_where_any_is_allowed(ranks: RankCases) -> None:
    ranks.assert_passed("out of order on a mesh", 4)


@pytest.mark.parametrize("case", [*meshes.CASES])
def test_each_replica_of_a_mesh_has_its_share_of_the_samples_also_after_a_resume(ranks: RankCases, case: str) -> None:
    ranks.assert_passed(case, 4)


@pytest.mark.parametrize("kind", [*loading.LOADERS])
def test_a_rank_that_looks_at_a_batch_stays_in_the_epoch_of_the_others(ranks: RankCases, kind: str) -> None:
    ranks.assert_passed(f"peek {kind}", 4)
    ranks.assert_passed(f"peek in the only replica {kind}", 4)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", [*loading.LOADERS])
def test_one_rank_goes_on_from_the_distributed_checkpoint_of_four(ranks: RankCases, folder: Path, kind: str) -> None:
    ranks.assert_passed(f"saves {kind}", 4)
    seen = [number for path in (folder / "4").glob(f"first {kind}.*") for number in json.loads(path.read_text())]
    loader = loading.LOADERS[kind](folder, **({} if kind == "stream" else {"num_workers": 0}))
    dcp.load({"loader": loader}, checkpoint_id=folder / "4" / kind, no_dist=True)
    rest = [number for batch in loader for number in loading.numbers(batch)]
    assert sorted(seen + rest) == list(range(loading.COUNT))
