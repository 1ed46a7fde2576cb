"""tf.data: a parallel map over indices, TensorFlow's own JPEG decoder with a fused crop, prefetching by two batches."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.adapters import WORKERS, Epochs
from benchmarks.workloads import Integers, Pool, Workload

CROP = 224


class TfData:
    """Two parallel calls in TensorFlow's threads; for ints, arrays in memory and JPEG files."""

    name = "tf.data"

    def why_unavailable(self) -> str | None:
        return None if importlib.util.find_spec("tensorflow") else "not installed"

    def supports(self, workload: Workload) -> bool:
        return isinstance(workload.dataset, Pool | Integers) or hasattr(workload.dataset, "paths")

    @contextmanager
    def open(
        self, workload: Workload, *, workers: int = WORKERS, persistent: bool = True, method: str | None = None
    ) -> Iterator[Epochs]:
        import tensorflow as tf

        indices = tf.data.Dataset.range(workload.samples)
        made = indices if isinstance(workload.dataset, Integers) else indices.map(_sample(workload), workers)
        options = tf.data.Options()
        options.threading.private_threadpool_size = workers
        yield _Arrays(made.batch(workload.batch_size).prefetch(2).with_options(options))


class _Arrays:
    """A tf.data.Dataset whose epochs are NumPy arrays, which is a view for TensorFlow's CPU tensors."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset.as_numpy_iterator())


def _sample(workload: Workload) -> Any:
    """Return TensorFlow's way from an index to a sample of `workload`."""
    import tensorflow as tf

    if isinstance(workload.dataset, Pool):
        pool = tf.constant(workload.dataset.pool)
        return lambda index: tf.gather(pool, index % len(pool))
    paths = tf.constant(workload.dataset.paths)  # type: ignore[attr-defined]

    def decode(index: Any) -> Any:
        content = tf.io.read_file(tf.gather(paths, index % len(paths)))
        height, width = tf.unstack(tf.image.extract_jpeg_shape(content)[:2])
        top = tf.random.uniform((), 0, height - CROP, tf.int32)
        left = tf.random.uniform((), 0, width - CROP, tf.int32)
        image = tf.image.decode_and_crop_jpeg(content, [top, left, CROP, CROP], channels=3)
        return tf.transpose(tf.image.random_flip_left_right(image), (2, 0, 1))

    return decode
