"""What it costs to hand batches over: ready-made samples, collated and sent by as many workers as the loader has."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from penstock.feed.loader import DataLoader as PenstockLoader

_LEAST_TURNS = 3
_TIMES = 3
"""What else the machine does makes it slower for a while, and never faster: the best of so many counts."""


class ReadyMade(Dataset[Any]):
    """Samples that have been made before.

    Args:
        samples: a batch of them.
        times: how often each is given.
    """

    def __init__(self, samples: list[Any], times: int) -> None:
        self._samples = samples
        self._times = times

    def __len__(self) -> int:
        return len(self._samples) * self._times

    def __getitem__(self, index: int) -> Any:
        return self._samples[index % len(self._samples)]


def handing_s(loader: DataLoader[Any], samples: list[Any], seconds: float) -> float:
    """Return seconds per batch that collating `samples` and handing them over takes, as the loader would do it.

    Raises:
        Exception: the collate function's, or that of a loader that cannot start its workers.
    """
    is_auto = loader._auto_collation
    kind = PenstockLoader if isinstance(loader, PenstockLoader) else DataLoader
    made = kind(
        ReadyMade(samples, 100_000),
        batch_size=len(samples) if is_auto else None,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
    )
    batches = iter(made)
    try:
        for _ in range(max(2, loader.num_workers * (loader.prefetch_factor or 2))):
            next(batches)
        turn = max(1, loader.num_workers)  # batches come as many at a time as there are workers
        return min(_typical_s(batches, turn, seconds / _TIMES) for _ in range(_TIMES))
    finally:
        shut = getattr(batches, "_shutdown_workers", None)
        if shut is not None:
            shut()


def _typical_s(batches: Iterator[Any], turn: int, seconds: float) -> float:
    """Return the median seconds per batch of turns of so many, taken for a while."""
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while len(taken) < _LEAST_TURNS or time.perf_counter() < until:
        began = time.perf_counter()
        for _ in range(turn):
            next(batches)
        taken.append((time.perf_counter() - began) / turn)
    return statistics.median(taken)
