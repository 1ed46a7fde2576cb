"""Grain: a MapDataset of the samples, batched, made in worker processes that hand batches over in shared memory.

One iterator runs through all epochs, as Grain's guide trains (`repeat`): a new one would start its workers anew, which
takes seconds. The first batches of an epoch are therefore made while the one before ends.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from benchmarks.adapters import WORKERS, OpenLoader
from benchmarks.workloads import Workload


class Grain:
    """Batches are made in its worker processes, in order."""

    name = "Grain, processes"

    def why_unavailable(self) -> str | None:
        return None if importlib.util.find_spec("grain") else "not installed"

    def supports(self, workload: Workload) -> bool:
        return True

    def open(
        self, workload: Workload, *, workers: int = WORKERS, persistent: bool = True, method: str | None = None
    ) -> OpenLoader:
        import grain

        batches = grain.MapDataset.source(_Arrays(workload.dataset)).batch(workload.batch_size).repeat()
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
        endless = batches.to_iter_dataset(grain.ReadOptions(num_threads=0)).mp_prefetch(options)
        return OpenLoader(_Epochs(iter(endless), workload.batches))


class _Arrays:
    """A dataset whose tensors are given as the NumPy arrays that they share their memory with."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        return np.asarray(sample) if hasattr(sample, "numpy") else sample


class _Epochs:
    def __init__(self, batches: Iterator[Any], length: int) -> None:
        self._batches, self._length = batches, length

    def __iter__(self) -> Iterator[Any]:
        return islice(self._batches, self._length)
