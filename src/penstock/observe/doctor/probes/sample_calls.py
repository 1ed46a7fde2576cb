"""The calls that make a loader's samples, one by one, in the order of its sampler."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind


class StreamEndedError(Exception):
    """Raised by a sample call of an IterableDataset that has no more samples."""


def iter_sample_calls(loader: DataLoader[Any]) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """Yield the index of each sample and a function that makes it."""
    dataset: Any = loader.dataset
    if loader._dataset_kind == _DatasetKind.Iterable:
        stream = iter(dataset)
        for position in itertools.count():
            yield position, lambda: _next_sample(stream)
    bulk = getattr(dataset, "__getitems__", None)
    for indices in loader._index_sampler:
        for index in indices if loader.batch_sampler is not None else [indices]:
            if bulk is not None and loader.batch_sampler is not None:
                yield index, lambda index=index: bulk([index])[0]  # type: ignore[misc]
            else:
                yield index, lambda index=index: dataset[index]  # type: ignore[misc]


def samples_per_batch(loader: DataLoader[Any]) -> int:
    """Return how many samples make a batch; 1 where the dataset returns whole batches."""
    if loader.batch_sampler is None:
        return 1
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if isinstance(size, int):
        return size
    try:
        return len(next(iter(loader._index_sampler)))
    except (TypeError, StopIteration):
        return 1


def _next_sample(stream: Iterator[Any]) -> Any:
    for sample in stream:
        return sample
    raise StreamEndedError
