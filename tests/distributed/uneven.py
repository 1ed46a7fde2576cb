"""What each rank of tests/distributed/test_uneven.py runs, under the real torchrun: `uneven.py FOLDER CASE...`."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import penstock

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from end_together import run_cases

COUNTS = (13, 7, 21, 9, 3)
TOTAL = sum(COUNTS)


def loader_of(folder: Path, kind: str, uneven: str, workers: int, **options: Any) -> penstock.DataLoader[Any]:
    """Return a loader of a stream of the numbers below TOTAL, of known length or, filtered, of unknown length."""
    stream = penstock.open(sorted(map(str, folder.glob("*.jsonl"))))
    if kind == "filtered":
        stream = stream.shuffle(seed=2, shuffle_block=4).filter(lambda sample: sample["x"] % 5 != 0)
    return penstock.DataLoader(stream, 2, num_workers=workers, distributed=True, uneven=uneven, **options)  # type: ignore[arg-type]


def gathered(mine: Any) -> list[Any]:
    """Return what all ranks have."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def wanted(kind: str) -> list[int]:
    """Return the numbers of an epoch."""
    return [number for number in range(TOTAL) if kind != "filtered" or number % 5]


def check_epoch(kind: str, uneven: str, ranks: list[list[list[int]]]) -> None:
    """Check what the ranks have had of an epoch, by batches."""
    steps = [len(batches) for batches in ranks]
    seen = [number for batches in ranks for batch in batches for number in batch]
    assert steps == [steps[0]] * len(steps), steps
    if uneven == "drop":
        assert len(seen) == len(set(seen))
        assert set(seen) <= set(wanted(kind))
    else:
        assert set(seen) == set(wanted(kind))
        own = [{number for batch in batches for number in batch} for batches in ranks]
        assert sum(map(len, own)) == len(set().union(*own))  # what comes again is a rank's own


def train(folder: Path, kind: str, uneven: str) -> None:
    """Train with DistributedDataParallel for three epochs, whose steps wait for each other."""
    for workers in (0, 2):
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.001)
        loader = loader_of(folder.parent, kind, uneven, workers, persistent_workers=workers > 0)
        orders = []
        for epoch in range(3):
            mine = []
            for batch in loader:
                optimizer.zero_grad()
                model(batch["x"][:, None].float() / TOTAL).square().mean().backward()
                optimizer.step()
                mine.append(batch["x"].tolist())
            assert len(set(gathered(epoch))) == 1
            orders.append(gathered(mine))
            check_epoch(kind, uneven, orders[-1])
        assert kind == "known" or orders[0] != orders[1]
        weights = [parameter.detach().tolist() for parameter in model.parameters()]
        assert all(one == weights for one in gathered(weights))


def resume(folder: Path, kind: str, uneven: str) -> None:
    """Stop after each number of steps; go on with other workers from a list and from DCP: the rest comes."""
    steps = min(gathered(sum(1 for _ in loader_of(folder.parent, kind, uneven, 0))))
    for taken in range(steps):  # after the last one comes the next epoch
        before, after = ((0, 0), (0, 1), (2, 0), (2, 1))[taken % 4]
        way = ("dcp", "list", "own")[taken % 3]
        loader = loader_of(folder.parent, kind, uneven, before)
        iterator = iter(loader)
        mine = [next(iterator)["x"].tolist() for _ in range(taken)]
        other = loader_of(folder.parent, kind, uneven, after)
        if way == "dcp":
            dcp.save({"loader": loader}, checkpoint_id=folder / f"{kind} {uneven} {taken}")
            dcp.load({"loader": other}, checkpoint_id=folder / f"{kind} {uneven} {taken}")
        else:
            states = gathered(loader.state_dict())
            other.load_state_dict(states if way == "list" else states[dist.get_rank()])
        mine += [batch["x"].tolist() for batch in other]
        every = gathered(mine)
        seen = [number for batches in every for batch in batches for number in batch]
        assert len({len(batches) for batches in every}) == 1, (taken, before, after, way, [len(one) for one in every])
        if uneven == "drop":
            assert len(seen) == len(set(seen)), (taken, before, after, way)
        else:
            assert set(seen) == set(wanted(kind)), (taken, before, after, way, sorted(set(wanted(kind)) - set(seen)))


def peek(folder: Path, kind: str, uneven: str) -> None:
    """Have one rank look at a batch alone; then all train."""
    loader = loader_of(folder.parent, kind, uneven, 1)
    if dist.get_rank() == 1:
        next(iter(loader))
    dist.barrier()
    check_epoch(kind, uneven, gathered([batch["x"].tolist() for batch in loader]))
    assert loader.statistics().epochs == 1


CASES: dict[str, tuple[Any, ...]] = {
    f"{function.__name__} {kind} {uneven}": (function, kind, uneven)
    for function, kind, uneven in product((train, resume, peek), ("known", "filtered"), ("drop", "pad"))
}

if __name__ == "__main__":

    def run(case: str) -> None:
        """Run one case."""
        function, *arguments = CASES[case]
        function(Path(sys.argv[1]), *arguments)

    run_cases(run, *sys.argv[1:])
