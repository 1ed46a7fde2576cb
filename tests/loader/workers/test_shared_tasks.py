"""Tasks that any worker may take: each wakes one of those that have nothing to do."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from penstock import DataLoader

WORKERS, TASKS = 8, 100


def waits(pids: Sequence[int | None]) -> int:
    """Return how often the processes have waited for anything."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_shared_task_wakes_one_idle_worker_and_not_all() -> None:
    loader = DataLoader(
        TensorDataset(torch.arange(2 * TASKS)), batch_size=1, num_workers=WORKERS, dispatch="demand", shuffle=False
    )
    batches = iter(loader)
    order = [int(next(batches)[0]) for _ in range(TASKS // 2)]
    pids = [process.pid for process in multiprocessing.active_children()]
    assert len(pids) == WORKERS
    before = waits(pids)
    for _ in range(TASKS):
        order.append(int(next(batches)[0]))
        time.sleep(0.001)  # the step: meanwhile everybody waits again
    assert waits(pids) - before < TASKS * WORKERS / 2
    assert [*order, *(int(batch[0]) for batch in batches)] == list(range(2 * TASKS))
