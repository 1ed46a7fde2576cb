"""SPDL: its DataLoader, which makes samples in threads; the same stages in a subprocess with a pool of segments; and
its loader for torch datasets, which starts its processes anew for every epoch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.data import default_collate

from benchmarks.adapters import WORKERS, Epochs, OpenLoader
from benchmarks.epoch_timing import arrays
from benchmarks.workloads import Workload

BUFFERED = 2 * WORKERS


class SpdlThreads:
    """Samples are made in threads, one by one, then put together; in the order of the source."""

    name = "SPDL, threads"

    def why_unavailable(self) -> str | None:
        return None if importlib.util.find_spec("spdl") else "not installed"

    def supports(self, workload: Workload) -> bool:
        return True

    def open(
        self, workload: Workload, *, workers: int = WORKERS, persistent: bool = True, method: str | None = None
    ) -> OpenLoader:
        from spdl.dataloader import DataLoader

        return OpenLoader(
            DataLoader(
                range(workload.samples),
                preprocessor=workload.dataset.__getitem__,
                batch_size=workload.batch_size,
                aggregator=default_collate,
                num_threads=workers,
                buffer_size=BUFFERED,
                output_order="input",
            )
        )


class SpdlSubprocess:
    """The same in the threads of one subprocess, whose batches come back through segments that are reused."""

    name = "SPDL, subprocess"

    def why_unavailable(self) -> str | None:
        return SpdlThreads().why_unavailable()

    def supports(self, workload: Workload) -> bool:
        return True

    @contextmanager
    def open(
        self, workload: Workload, *, workers: int = WORKERS, persistent: bool = True, method: str | None = None
    ) -> Iterator[Epochs]:
        from spdl.pipeline import PipelineBuilder, SharedMemorySegmentPool, run_pipeline_in_subprocess

        config = (
            PipelineBuilder()
            .add_source(range(workload.samples))
            .pipe(workload.dataset.__getitem__, concurrency=workers, output_order="input")
            .aggregate(workload.batch_size)
            .pipe(default_collate)
            .add_sink(BUFFERED)
            .get_config()
        )
        sample_nbytes = sum(array.nbytes for array in arrays(default_collate([workload.dataset[0]])))
        pool = SharedMemorySegmentPool(workload.batch_size * sample_nbytes + (1 << 16), BUFFERED + 2)
        with OpenLoader(run_pipeline_in_subprocess(config, num_threads=workers, arena=pool)) as held:
            yield held


class SpdlTorch(SpdlThreads):
    """Its loader for torch datasets (`get_pytorch_dataloader`): worker processes, batches in the sampler's order."""

    name = "SPDL, torch datasets"

    def open(
        self, workload: Workload, *, workers: int = WORKERS, persistent: bool = True, method: str | None = None
    ) -> OpenLoader:
        from spdl.dataloader import get_pytorch_dataloader

        return OpenLoader(
            get_pytorch_dataloader(
                workload.dataset,
                batch_size=workload.batch_size,
                num_workers=workers,
                in_order=True,
                multiprocessing_context=method or "fork",
            )
        )
