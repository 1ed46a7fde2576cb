"""What each rank of tests/distributed/test_loading.py runs, under the real torchrun: `loading.py FOLDER CASE...`."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshes import CASES as MESHES
from torch.distributed.device_mesh import init_device_mesh

import penstock

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from end_together import run_cases

COUNT = 40


def stream(folder: Path, **options: Any) -> penstock.DataLoader[Any]:
    """Return a loader of the shuffled numbers below COUNT in files of `folder`."""
    numbered = penstock.open(sorted(map(str, folder.glob("*.jsonl")))).shuffle(seed=1)
    return penstock.DataLoader(numbered, 2, uneven="join", **options)


def out_of_order(folder: Path, **options: Any) -> penstock.DataLoader[Any]:
    """Return a loader whose ranks have taken other parts of one order."""
    order = {"shuffle": True, "seed": 1, "distributed": True, "num_workers": 1, "in_order": False}
    return penstock.DataLoader(range(COUNT), 2, **{**order, **options})  # type: ignore[arg-type]


LOADERS: dict[str, Callable[..., penstock.DataLoader[Any]]] = {"stream": stream, "out of order": out_of_order}


def numbers(batch: Any) -> list[int]:
    """Return the numbers in a batch."""
    found: list[int] = (batch["x"] if isinstance(batch, dict) else batch).tolist()
    return found


def save_in_the_middle(folder: Path, kind: str) -> None:
    """Take two batches (the last rank: one, of a stream), save with DCP, and go on with what it has loaded."""
    loader = LOADERS[kind](folder.parent)
    iterator = iter(loader)
    taken = 1 if kind == "stream" and dist.get_rank() == dist.get_world_size() - 1 else 2
    first = [number for _ in range(taken) for number in numbers(next(iterator))]
    dcp.save({"loader": loader}, checkpoint_id=folder / kind)
    other = LOADERS[kind](folder.parent)
    dcp.load({"loader": other}, checkpoint_id=folder / kind)
    rest = [number for batch in iterator for number in numbers(batch)]
    assert sorted(number for batch in other for number in numbers(batch)) == sorted(rest)
    (folder / f"first {kind}.{dist.get_rank()}.json").write_text(json.dumps(first))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = LOADERS[kind](folder.parent, distributed=mesh["dp"])
    dcp.load({"loader": other}, checkpoint_id=folder / kind)
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, [first, sorted(number for batch in other for number in numbers(batch))])
    assert found[0][1] == found[1][1]
    assert sorted(number for one, _ in found for number in one) == sorted(
        {*range(COUNT)} - {*found[0][1], *found[2][1]}
    )
    assert len(found[0][1]) + len(found[2][1]) + sum(len(one) for one, _ in found) == COUNT


def on_a_mesh(folder: Path, kind: str) -> None:
    """Have ranks of one data-parallel replica get the same batches, and the replicas share out the samples."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(dist.get_rank())
    for distributed in (mesh["dp"], mesh["dp"].get_group()):
        own = [numbers(batch) for batch in LOADERS[kind](folder.parent, distributed=distributed, in_order=True)]
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, own)
        assert found[0] == found[1]
        assert found[2] == found[3]
        assert sorted(number for one in found[::2] for batch in one for number in batch) == list(range(COUNT))
    try:
        LOADERS[kind](folder.parent, distributed=mesh)
    except penstock.OptionError as error:
        assert "mesh of 2 dimensions ('dp', 'tp')" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a mesh of two dimensions was taken")


def out_of_order_on_a_mesh(folder: Path) -> None:
    """Have ranks of one replica get the same batches in the same order, though any order is allowed.

    Which worker is faster is left to chance. But a state says whether batches have been in order: then one rank's is
    enough for any others.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    loader = out_of_order(folder.parent, distributed=mesh["dp"], num_workers=2)
    batches = iter(loader)
    first = [numbers(next(batches)) for _ in range(3)]
    alone = out_of_order(folder.parent, distributed=False, in_order=True, num_workers=0)
    alone.load_state_dict(loader.state_dict())
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, first + [numbers(batch) for batch in batches])
    assert found[0] == found[1]
    assert found[2] == found[3]
    seen = [number for one in found[::2] for batch in one[:3] for number in batch]
    assert sorted(seen + [number for batch in alone for number in numbers(batch)]) == list(range(COUNT))


def peek(folder: Path, kind: str) -> None:
    """Have one rank look at a batch before each epoch: ranks still share out the epochs, which differ."""
    loader = LOADERS[kind](folder.parent, in_order=True, num_workers=1, persistent_workers=kind == "stream")
    epochs = []
    for _ in range(2):
        if dist.get_rank() == 1:
            next(iter(loader))
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, [number for batch in loader for number in numbers(batch)])
        epochs.append([number for one in found for number in one])
        assert sorted(epochs[-1]) == list(range(COUNT))
    assert epochs[0] != epochs[1]
    for epoch, left_after in ((1, 2), (0, 1)):
        loader.set_epoch(epoch)
        iterator = iter(loader)
        for _ in range(left_after):
            next(iterator)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        iterator = iter(loader)
        assert not warned
        next(iterator)
        next(iterator)
        iter(loader)
    assert ["epoch 0 was left after 2 batches" in str(one.message) for one in warned] == [True]


def peek_in_the_only_replica(folder: Path, kind: str) -> None:
    """Have one rank of a replica look at a batch before each epoch, where no other replica shares out the samples."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    loader = LOADERS[kind](folder.parent, distributed=mesh["dp"], in_order=True, num_workers=0)
    epochs = []
    for _ in range(2):
        if dist.get_rank() == 1:
            next(iter(loader))
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, [number for batch in loader for number in numbers(batch)])
        assert all(one == found[0] for one in found)
        assert sorted(found[0]) == list(range(COUNT))
        epochs.append(found[0])
    assert epochs[0] != epochs[1]


CASES: dict[str, tuple[Any, ...]] = {f"peek {kind}": (peek, kind) for kind in LOADERS}
CASES |= {f"mesh {kind}": (on_a_mesh, kind) for kind in LOADERS}
CASES |= {f"saves {kind}": (save_in_the_middle, kind) for kind in LOADERS}
CASES |= {f"peek in the only replica {kind}": (peek_in_the_only_replica, kind) for kind in LOADERS}
CASES["out of order on a mesh"] = (out_of_order_on_a_mesh,)
CASES |= {case: (run,) for case, run in MESHES.items()}

if __name__ == "__main__":

    def run(case: str) -> None:
        """Run one case."""
        function, *arguments = CASES[case]
        function(Path(sys.argv[1]), *arguments)

    run_cases(run, *sys.argv[1:])
