"""FFCV on the CPU: the samples are written once to its own file, which its threads read with code compiled by numba.

JPEG files are written into it as JPEGs of the same quality, and decoded by turbojpeg with its random crop (which also
resizes: a plain crop is not among its decoders) and flip.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.adapters import WORKERS, Epochs
from benchmarks.workloads import Integers, Pool, Workload


class Ffcv:
    """Two threads, in the order of the file, which the system's page cache holds."""

    name = "FFCV"

    def why_unavailable(self) -> str | None:
        return None if importlib.util.find_spec("ffcv") else "not installed"

    def supports(self, workload: Workload) -> bool:
        return isinstance(workload.dataset, Pool | Integers) or hasattr(workload.dataset, "paths")

    @contextmanager
    def open(
        self, workload: Workload, *, workers: int = WORKERS, persistent: bool = True, method: str | None = None
    ) -> Iterator[Epochs]:
        from ffcv.loader import Loader, OrderOption
        from ffcv.writer import DatasetWriter

        field, pipeline = _layout(workload)
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            file = str(Path(folder) / "samples.beton")
            DatasetWriter(file, {"sample": field}, num_workers=workers).from_indexed_dataset(_Rows(workload))
            yield Loader(
                file,
                batch_size=workload.batch_size,
                num_workers=workers,
                order=OrderOption.SEQUENTIAL,
                os_cache=True,
                pipelines={"sample": pipeline},
            )


class _Rows:
    """A workload's samples as FFCV's writer wants them."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def __len__(self) -> int:
        return self._workload.samples

    def __getitem__(self, index: int) -> tuple[Any]:
        dataset = self._workload.dataset
        if hasattr(dataset, "paths"):
            from PIL import Image

            with Image.open(dataset.paths[index % len(dataset.paths)]) as image:
                return (np.array(image.convert("RGB")),)
        sample = dataset[int(index)]
        return (sample if isinstance(sample, int) else sample.numpy(),)


def _layout(workload: Workload) -> tuple[Any, list[Any]]:
    """Return the field that samples are written to, and the operations that make batches of it."""
    from ffcv.fields import IntField, NDArrayField, RGBImageField
    from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage

    dataset = workload.dataset
    if isinstance(dataset, Integers):
        return IntField(), [IntDecoder(), ToTensor()]
    if isinstance(dataset, Pool):
        return NDArrayField(dataset.pool.dtype, dataset.pool.shape[1:]), [NDArrayDecoder(), ToTensor()]
    from benchmarks.jpegs import CROP, HEIGHT, QUALITY, WIDTH

    share = CROP * CROP / (WIDTH * HEIGHT)
    crop = RandomResizedCropRGBImageDecoder((CROP, CROP), scale=(share, share), ratio=(1.0, 1.0))
    return (
        RGBImageField(write_mode="jpg", max_resolution=max(WIDTH, HEIGHT), jpeg_quality=QUALITY),
        [crop, RandomHorizontalFlip(), ToTensor(), ToTorchImage(channels_last=False)],
    )
