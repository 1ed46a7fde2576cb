"""torchdata.nodes, as its migration guide builds a DataLoader: a sampler, a batcher, a parallel map that collates."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils.data import Dataset, SequentialSampler, default_collate

from benchmarks.adapters import WORKERS, Epochs
from benchmarks.workloads import Workload

NAMES = {"thread": "threads", "process": "processes"}


class TorchdataNodes:
    """Batches are made by threads or by processes, and prefetched. Both are started anew for every epoch."""

    def __init__(self, method: str) -> None:
        self.name = f"torchdata.nodes, {NAMES[method]}"
        self._method = method

    def why_unavailable(self) -> str | None:
        return None if importlib.util.find_spec("torchdata") else "not installed"

    def supports(self, workload: Workload) -> bool:
        return True

    @contextmanager
    def open(
        self, workload: Workload, *, workers: int = WORKERS, persistent: bool = True, method: str | None = None
    ) -> Iterator[Epochs]:
        from torchdata import nodes

        node = nodes.SamplerWrapper(SequentialSampler(workload.dataset))  # type: ignore[arg-type]
        node = nodes.Batcher(node, workload.batch_size)
        fetch = partial(_fetch, workload.dataset)
        node = nodes.ParallelMapper(node, fetch, num_workers=workers, method=self._method)
        node = nodes.Prefetcher(node, prefetch_factor=2 * workers)
        loader = nodes.Loader(node)
        try:
            yield loader
        finally:
            del node, loader
            gc.collect()


def _fetch(dataset: Dataset[Any], indices: list[int]) -> Any:
    return default_collate([dataset[index] for index in indices])
