"""The attributes of a loader's datasets, and of the objects that they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

from penstock.core import object_attributes

_DEPTH = 4
_MOST_DATASETS = 32
_MOST_ATTRIBUTES = 256
_NO_OBJECTS = (type, ModuleType, FunctionType, MethodType, torch.Tensor, torch.nn.Module, np.ndarray, DataLoader)


def datasets_below(dataset: Any, index: Any = None) -> list[tuple[Any, Any]]:
    """Return a dataset and those that it wraps, each with the index that `index` becomes there; None if unknown.

    >>> [place for _, place in datasets_below(Subset(Subset(range(9), [7, 8]), [1]), 0)]
    [0, 1, 8]
    """
    return list(islice(_below(dataset, index, _DEPTH), _MOST_DATASETS))


def stored_values(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a dataset, and those of the objects in them, by their paths; no property is asked.

    >>> [path for path, _ in stored_values(torch.utils.data.TensorDataset(torch.ones(2)))]
    ['tensors']
    """
    for name, value in attributes_of(dataset).items():
        yield name, value
        if not isinstance(value, torch.utils.data.Dataset):
            yield from ((f"{name}.{inner}", one) for inner, one in attributes_of(value).items())


def attributes_of(value: Any) -> Mapping[str, Any]:
    """Return the attributes of an object; none of a module, a class, a tensor or a model."""
    if isinstance(value, _NO_OBJECTS):
        return {}
    return dict(islice(object_attributes.attributes_of(value).items(), _MOST_ATTRIBUTES))


def _below(dataset: Any, index: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    yield dataset, index
    if not depth:
        return
    if isinstance(dataset, Subset):
        yield from _below(dataset.dataset, _item(dataset.indices, index), depth - 1)
    elif isinstance(dataset, ConcatDataset):
        start = 0
        for part, end in zip(dataset.datasets, dataset.cumulative_sizes, strict=False):
            is_here = isinstance(index, int) and start <= index < end
            yield from _below(part, index - start if is_here else None, depth - 1)
            start = end
    else:
        for value in attributes_of(dataset).values():
            if isinstance(value, torch.utils.data.Dataset):
                yield from _below(value, index, depth - 1)


def _item(indices: Any, index: Any) -> Any:
    try:
        return int(indices[index])
    except (TypeError, IndexError, ValueError, KeyError):
        return None
