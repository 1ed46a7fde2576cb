"""What each rank of test_listing.py runs, under the real torchrun: `listing.py FOLDER CASE...`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import penstock
from penstock.core.errors import OptionError, SourceError

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from end_together import run_cases

COUNT = 24


def read_all(url: str) -> None:
    """Read a share of the images in two workers; together the ranks have all."""
    images = penstock.open(url, fields=["encoded"], distributed=True)
    loader = penstock.DataLoader(images, batch_size=2, num_workers=2, distributed=True, collate_fn=list)
    mine = [sample["encoded"] for batch in loader for sample in batch]
    every: list[list[bytes]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    assert len({one for some in every for one in some}) == COUNT


def assert_refused(kind: type[Exception], says: str, url: str, distributed: Any = True) -> None:
    with pytest.raises(kind, match=says):
        penstock.open(url, distributed=distributed)


def run_case(case: str) -> None:
    url, rank = os.environ["SERVED"], dist.get_rank()
    if case == "share":
        read_all(f"{url}/share/")
    elif case == "group":  # only the ranks of the group come by
        members = [1, dist.get_world_size() - 1]
        group = dist.new_group(members)
        if rank in members:
            assert len(penstock.open(f"{url}/group/", distributed=group)) == COUNT
        else:
            assert_refused(OptionError, "this process is not in", f"{url}/group/", group)
    elif case == "missing":
        assert_refused(SourceError, "/missing/", f"{url}/missing/")
    elif rank:  # different
        assert_refused(OptionError, "rank 0 opens http.*/alone/ while this one opens", f"{url}/share/")
    else:
        penstock.open(f"{url}/alone/", distributed=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_cases(run_case, *sys.argv[1:])
