"""Hugging Face's datasets: rows of an Arrow table as tensors, a batch by one call, in torch's DataLoader."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.adapters import WORKERS, OpenLoader
from benchmarks.workloads import Integers, Pool, Workload


class HuggingFace:
    """A `datasets.Dataset` of the samples in memory, `with_format("torch")`; the loader asks it for whole batches."""

    name = "Hugging Face datasets"

    def why_unavailable(self) -> str | None:
        return None if importlib.util.find_spec("datasets") else "not installed"

    def supports(self, workload: Workload) -> bool:
        return isinstance(workload.dataset, Pool | Integers)

    def open(
        self, workload: Workload, *, workers: int = WORKERS, persistent: bool = True, method: str | None = None
    ) -> OpenLoader:
        loader: DataLoader[Any] = DataLoader(
            _table(workload),
            batch_size=workload.batch_size,
            num_workers=workers,
            persistent_workers=persistent and workers > 0,
            multiprocessing_context=method,
        )
        return OpenLoader(_Epochs(loader))


class _Epochs:
    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches: Iterator[Mapping[str, Any]] = iter(self._loader)
        return (batch["sample"] for batch in batches)


def _table(workload: Workload) -> Any:
    import datasets

    if isinstance(workload.dataset, Integers):
        return datasets.Dataset.from_dict({"sample": range(workload.samples)}).with_format("torch")
    assert isinstance(workload.dataset, Pool)
    pool = workload.dataset.pool
    kinds: dict[int, Any] = {3: datasets.Array2D, 4: datasets.Array3D, 5: datasets.Array4D}
    dtype = str(pool.dtype)
    kind = kinds[pool.ndim](pool.shape[1:], dtype) if pool.ndim > 2 else datasets.Sequence(datasets.Value(dtype))
    rows = datasets.Dataset.from_dict({"sample": list(pool)}, datasets.Features({"sample": kind}))
    dtyped = rows.with_format("torch", dtype=torch.from_numpy(pool[:0]).dtype)  # else integers become int64
    return dtyped.select(np.arange(workload.samples) % len(pool))
