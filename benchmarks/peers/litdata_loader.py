"""LitData: samples written to chunks of 64 MB before, which its StreamingDataLoader reads from the disk in workers."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks.adapters import WORKERS, Epochs, OpenLoader
from benchmarks.workloads import Integers, Pool, Workload


class LitData:
    """A StreamingDataset of the samples in a folder of its own, in their order."""

    name = "LitData"

    def why_unavailable(self) -> str | None:
        return None if importlib.util.find_spec("litdata") else "not installed"

    def supports(self, workload: Workload) -> bool:
        return isinstance(workload.dataset, Pool | Integers)

    @contextmanager
    def open(
        self, workload: Workload, *, workers: int = WORKERS, persistent: bool = True, method: str | None = None
    ) -> Iterator[Epochs]:
        import litdata

        folder = tempfile.mkdtemp(prefix="litdata-")
        try:
            litdata.optimize(
                partial(_sample, workload.dataset),
                list(range(workload.samples)),
                folder,
                chunk_bytes="64MB",
                num_workers=1,
                start_method="fork",
                verbose=False,
            )
            loader = litdata.StreamingDataLoader(
                litdata.StreamingDataset(folder),
                batch_size=workload.batch_size,
                num_workers=workers,
                persistent_workers=persistent and workers > 0,
                multiprocessing_context=method,
            )
            with OpenLoader(loader) as epochs:
                yield epochs
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _sample(dataset: Any, index: int) -> Any:
    return dataset[index]
