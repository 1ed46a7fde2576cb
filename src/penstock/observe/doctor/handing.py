"""What it costs to hand batches over: ready-made samples, collated and sent by as many workers as the loader has."""

from __future__ import annotations

import time
from typing import Any

from torch.utils.data import DataLoader, Dataset

from penstock.feed.loader import DataLoader as PenstockLoader

_LEAST_BATCHES = 6


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
        began, count = time.perf_counter(), 0
        while count < _LEAST_BATCHES or time.perf_counter() - began < seconds:
            next(batches)
            count += 1
        return (time.perf_counter() - began) / count
    finally:
        shut = getattr(batches, "_shutdown_workers", None)
        if shut is not None:
            shut()
