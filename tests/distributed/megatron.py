"""What each rank of test_megatron.py runs, under the real torchrun: `megatron.py FOLDER CASE...`.

Groups as Megatron makes them, by hand: neighbours hold parts of one replica's tensors, and a data-parallel
group has every TENSOR_PARALLEL-th rank. Each case loads what the one before has saved, on another number of ranks.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils.data import Dataset

import penstock

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from end_together import run_cases

TENSOR_PARALLEL, COUNT, LENGTH, GLOBAL_BATCH = 2, 72, 8, 8
STEPS: dict[str, int | None] = {"begin": 3, "go on": 4, "end": None}
"""Steps of the first epoch in each case; the last one has the rest, and the second epoch."""


class Sequences(Dataset[Any]):
    """Sequence i has the tokens from i * LENGTH on, and a number drawn at random."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": torch.arange(LENGTH) + index * LENGTH, "noise": penstock.sample_rng().integers(1 << 30)}


def sequences(batch_size: int, **options: Any) -> penstock.DataLoader[Any]:
    """Return a loader of samples by number, in a random order."""
    return penstock.DataLoader(Sequences(), batch_size, shuffle=True, seed=5, **options)


def documents(batch_size: int, *, folder: Path, **options: Any) -> penstock.DataLoader[Any]:
    """Return a loader of a shuffled stream."""
    stream = penstock.open(sorted(map(str, folder.glob("*.jsonl")))).shuffle(seed=2)
    return penstock.DataLoader(stream, batch_size, uneven="join", **options)


def loader_of(kind: str, folder: Path, workers: int) -> penstock.DataLoader[Any]:
    """Return the loader of this rank."""
    batch_size = GLOBAL_BATCH // (dist.get_world_size() // TENSOR_PARALLEL)
    given = {"distributed": data_parallel(), "num_workers": workers}
    return sequences(batch_size, **given) if kind == "map" else documents(batch_size, folder=folder, **given)


_groups: list[Any] = []


def data_parallel() -> Any:
    """Return this rank's data-parallel group."""
    if not _groups:
        world = dist.get_world_size()
        _groups.extend(dist.new_group([*range(first, world, TENSOR_PARALLEL)]) for first in range(TENSOR_PARALLEL))
    return _groups[dist.get_rank() % TENSOR_PARALLEL]


def of_all(found: Any) -> list[Any]:
    """Return what each rank has, by rank."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    return ranks


def in_step(loader: penstock.DataLoader[Any]) -> Iterator[list[Any] | None]:
    """Yield the batches of a pass as lists; None where other ranks have some left, as of a stream."""
    batches = iter(loader)
    while True:
        batch = next(batches, None)
        own = None if batch is None else [one.tolist() for one in batch.values()]
        if not any(one is not None for one in of_all(own)):
            return
        yield own


def save(kind: str, loader: penstock.DataLoader[Any], path: Path, how: str) -> None:
    """Save with torch.distributed.checkpoint, or as JSON: rank 0's state, or of a stream one of each replica."""
    if how == "dcp":
        dcp.save({"loader": loader}, checkpoint_id=path)
        return
    states = of_all(loader.state_dict())[::TENSOR_PARALLEL]
    if dist.get_rank() == 0:
        path.write_text(json.dumps(states[0] if kind == "map" else states))
    dist.barrier()


def load(loader: penstock.DataLoader[Any], path: Path, how: str) -> None:
    """Load what `save` has saved."""
    if how == "dcp":
        dcp.load({"loader": loader}, checkpoint_id=path)
    else:
        loader.load_state_dict(json.loads(path.read_text()))


def run(case: str) -> None:
    """Train on from the case before with each kind of loader, and note what each rank got of each epoch."""
    own = Path(sys.argv[1])
    folder = own.parent
    torch.manual_seed(dist.get_rank())
    for kind, how in itertools.product(("map", "stream"), ("dcp", "json")):
        loader = loader_of(kind, folder, workers=int(case == "begin"))
        if case != "begin":
            load(loader, folder / f"{kind}.{how}.{'begin' if case == 'go on' else 'go on'}", how)
        seen = [[*itertools.islice(in_step(loader), STEPS[case])]]
        if case == "end":
            seen.append([*in_step(loader)])
        else:
            save(kind, loader, folder / f"{kind}.{how}.{case}", how)
        (own / f"{kind} {how} {case}.{dist.get_rank()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    run_cases(run, *sys.argv[1:])
