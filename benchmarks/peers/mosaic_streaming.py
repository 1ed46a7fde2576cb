"""Mosaic Streaming: samples written to MDS shards before, which its StreamingDataLoader reads in worker processes."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.adapters import WORKERS, Epochs, OpenLoader
from benchmarks.workloads import Integers, Pool, Workload


class MosaicStreaming:
    """A StreamingDataset of the samples in a folder of its own, not shuffled."""

    name = "Mosaic Streaming"

    def why_unavailable(self) -> str | None:
        return None if importlib.util.find_spec("streaming") else "not installed"

    def supports(self, workload: Workload) -> bool:
        return isinstance(workload.dataset, Pool | Integers)

    @contextmanager
    def open(
        self, workload: Workload, *, workers: int = WORKERS, persistent: bool = True, method: str | None = None
    ) -> Iterator[Epochs]:
        import streaming

        folder = tempfile.mkdtemp(prefix="mosaic-")
        try:
            with streaming.MDSWriter(out=folder, columns={"sample": _encoding(workload)}) as writer:
                for index in range(workload.samples):
                    writer.write({"sample": _sample(workload, index)})
            dataset = streaming.StreamingDataset(local=folder, batch_size=workload.batch_size)
            loader = streaming.StreamingDataLoader(
                dataset,
                batch_size=workload.batch_size,
                num_workers=workers,
                persistent_workers=persistent and workers > 0,
                multiprocessing_context=method,
            )
            with OpenLoader(_Epochs(loader)) as held:
                del loader
                yield held
        finally:
            shutil.rmtree(folder)


class _Epochs:
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches: Iterator[Mapping[str, Any]] = iter(self._loader)
        return (batch["sample"] for batch in batches)


def _encoding(workload: Workload) -> str:
    if isinstance(workload.dataset, Integers):
        return "int"
    assert isinstance(workload.dataset, Pool)
    pool = workload.dataset.pool
    return f"ndarray:{pool.dtype}:{','.join(map(str, pool.shape[1:]))}"


def _sample(workload: Workload, index: int) -> Any:
    sample = workload.dataset[index]
    return sample if isinstance(sample, int) else sample.numpy()
