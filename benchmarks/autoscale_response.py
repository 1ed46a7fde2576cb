"""How soon num_workers="auto" follows a loop whose samples become six times as dear in the middle of an epoch.

It has dispatch="demand", without which the number of workers changes between epochs only.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from penstock import DataLoader

BATCHES, CHANGE, BATCH_SIZE = 240, 120, 10
BEFORE_S, AFTER_S, STEP_S = 0.001, 0.006, 0.025
WANTED = 3
"""Workers: 60 ms of work for a step of 25 ms."""


class Changing(Dataset[Tensor]):
    """Samples that sleep, as those of a slow store do: their cost does not depend on how busy the machine is."""

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(BEFORE_S if index < CHANGE * BATCH_SIZE else AFTER_S)
        return torch.full((3, 32, 32), float(index))


def follow() -> dict[str, Any]:
    """Run the loop with "auto" and with a fixed number that is enough; return what happened."""
    auto, fixed = _run("auto"), _run(4)
    workers = auto["workers"]
    late = next((batch for batch in range(CHANGE, BATCHES) if workers[batch] >= WANTED), None)
    return {
        "before": workers[CHANGE - 1],
        "after": workers[-1],
        "followed_after_batches": None if late is None else late - CHANGE,
        "in_order": auto["in_order"],
        "changes": [batch for batch in range(1, BATCHES) if workers[batch] != workers[batch - 1]],
        "seconds": auto["seconds"],
        "seconds_with_4": fixed["seconds"],
        "reason": auto["reason"],
    }


def _run(num_workers: int | Literal["auto"]) -> dict[str, Any]:
    loader = DataLoader(Changing(), batch_size=BATCH_SIZE, num_workers=num_workers, dispatch="demand")
    workers, seen, began = [], [], time.perf_counter()
    for batch in loader:
        seen += batch[:, 0, 0, 0].tolist()
        time.sleep(STEP_S)
        workers.append(loader.statistics().workers)
    return {
        "workers": workers,
        "in_order": seen == list(range(BATCHES * BATCH_SIZE)),
        "seconds": time.perf_counter() - began,
        "reason": loader.statistics().workers_reason,
    }
