"""NVIDIA DALI on the CPU: its own JPEG decoder with a random crop, and its parallel external source for arrays."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.adapters import WORKERS, Epochs
from benchmarks.workloads import SEED, Integers, Workload


class Dali:
    """A pipeline with two threads (JPEG) or two Python worker processes (arrays), read through its PyTorch iterator."""

    name = "DALI"

    def why_unavailable(self) -> str | None:
        return (
            None if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali") else "not installed"
        )

    def supports(self, workload: Workload) -> bool:
        return not isinstance(workload.dataset, Integers)

    @contextmanager
    def open(
        self, workload: Workload, *, workers: int = WORKERS, persistent: bool = True, method: str | None = None
    ) -> Iterator[Epochs]:
        from nvidia.dali.plugin.pytorch import DALIGenericIterator

        decodes = hasattr(workload.dataset, "paths")
        pipeline = (_decoding if decodes else _arrays)(workload, workers)
        pipeline.build()
        loader = DALIGenericIterator(
            pipeline, ["batch"], size=workload.samples if decodes else -1, auto_reset=True, prepare_first_batch=False
        )
        try:
            yield loader
        finally:
            del loader, pipeline


def _decoding(workload: Workload, workers: int) -> Any:
    from nvidia.dali import fn, pipeline_def, types

    paths = workload.dataset.paths  # type: ignore[attr-defined]
    files = [paths[index % len(paths)] for index in range(workload.samples)]

    @pipeline_def  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        encoded, _ = fn.readers.file(files=files, name="files")
        image = fn.decoders.image_crop(
            encoded,
            device="cpu",
            output_type=types.RGB,
            crop=(224, 224),
            crop_pos_x=fn.random.uniform(range=(0.0, 1.0)),
            crop_pos_y=fn.random.uniform(range=(0.0, 1.0)),
        )
        image = fn.flip(image, horizontal=fn.random.coin_flip())
        return fn.transpose(image, perm=[2, 0, 1])

    return pipeline(batch_size=workload.batch_size, num_threads=workers, device_id=None, seed=SEED)


def _arrays(workload: Workload, workers: int) -> Any:
    from nvidia.dali import fn, pipeline_def

    source = _Samples(workload)

    @pipeline_def  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        return fn.external_source(source, batch=False, parallel=True, dtype=source.dtype(), prefetch_queue_depth=2)

    return pipeline(
        batch_size=workload.batch_size,
        num_threads=workers,
        device_id=None,
        py_num_workers=workers,
        py_start_method="spawn",
    )


class _Samples:
    """What DALI's Python workers call."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def dtype(self) -> Any:
        from nvidia.dali import types

        return types.to_dali_type(str(self._workload.dataset[0].numpy().dtype))

    def __call__(self, info: Any) -> np.ndarray:
        if info.iteration >= self._workload.batches:
            raise StopIteration
        array: np.ndarray = self._workload.dataset[info.idx_in_epoch].numpy()
        return array
