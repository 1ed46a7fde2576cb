"""What each rank of test_caching.py runs, under the real torchrun: `caching.py FOLDER CASE...`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import penstock
from penstock.core.errors import OptionError

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from end_together import run_cases

COUNT = 24


class Squares(torch.utils.data.Dataset[Any]):
    def __init__(self, first: int = 0) -> None:
        self.first = [*range(first, first + COUNT)]

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.first[index] ** 2)


def read_all(cached: Any, group: Any = None) -> None:
    """Read all samples, a share in each rank in the first epoch, and the whole in the second."""
    mine = range(dist.get_rank(group), COUNT, dist.get_world_size(group))
    loader = penstock.DataLoader(cached, batch_size=2, num_workers=1, sampler=mine)
    assert [int(one) for batch in loader for one in batch] == [number**2 for number in mine]
    dist.barrier(group)
    assert [int(cached[number]) for number in range(COUNT)] == [number**2 for number in range(COUNT)]
    dist.barrier(group)
    info = cached.cache_info()
    assert (info.misses, info.entries, info.hits) == (COUNT, COUNT, COUNT * dist.get_world_size(group))


def run_case(case: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    if case == "share":
        read_all(penstock.cached(Squares(), "ram", limit="1MiB", distributed=True))
    elif case == "group":  # only the ranks of the group come by
        group = dist.new_group([1, world - 1])
        if rank in (1, world - 1):
            read_all(penstock.cached(Squares(), "ram", limit="1MiB", distributed=group), group)
    elif case == "alone":
        info = penstock.cached(Squares(), "ram", limit="1MiB").cache_info()
        assert (info.misses, info.hits) == (0, 0)
    elif case == "different":
        if rank:
            with pytest.raises(OptionError, match=f"rank 0 has it for something else than rank {rank}"):
                penstock.cached(Squares(5), "ram", limit="1MiB", distributed=True)
        else:
            penstock.cached(Squares(), "ram", limit="1MiB", distributed=True)
    else:  # impossible
        says = "lower limit=" if rank == 0 else r"lower limit= \(on rank 0, which makes it for all"
        with pytest.raises(OptionError, match=says):
            penstock.cached(Squares(), "ram", limit=1 << 61, distributed=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_cases(run_case, *sys.argv[1:])
