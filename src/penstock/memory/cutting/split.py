"""Cutting a batch into micro-batches along its samples, and the layers whose result that would change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.rnn import PackedSequence

from penstock.core.errors import OptionError
from penstock.core.tree import like_mapping

Split = Callable[[Any, int], Sequence[Any]]
"""`(batch, parts) -> batches`, in order, as even as can be."""

LayerNames = Sequence[str | type[nn.Module]]
"""Classes, their names, or qualified names of modules ("layer1.0.bn2")."""

_REMEDY = "pass split= to cut it, and batch_size= to count its samples"
_SAY_DIMS = "pass batch_dims=, as in batch_dims={'image': 0, 'table': None}"


def count_samples(batch: Any) -> int:
    """Return the number of samples in `batch`: the first dimension of its first tensor that has one.

    A tensor with a single row counts only where there is no other: such tensors (positions, say) go to every part.
    Lists of images ([channels, height, width]) and of dicts have a sample in each place.

    Raises:
        OptionError: no tensor has a first dimension.

    >>> count_samples({"positions": torch.zeros(1, 3), "x": torch.zeros(8, 3), "scale": torch.tensor(2.0)})
    8
    """
    if type(batch) in (tuple, list) and batch and type(first := batch[0]) is Tensor and first.ndim:
        size = first.shape[0]  # `len` is Python
        if size != 1:
            return size  # of most batches, at a tenth of the price
    if listed := _count_listed(batch):
        return listed
    found = 0
    for tensor in arrays_of(batch):
        if tensor.ndim > 0:
            found = 1
            if tensor.shape[0] != 1:
                return int(tensor.shape[0])
    if found:
        return 1
    raise OptionError(
        f"a batch of type {type(batch).__name__} has no tensor whose first dimension could be its samples; {_REMEDY}"
    )


def _count_listed(batch: Any) -> int:
    """Return the number of samples of a batch that has them in lists: of images, of dicts; 0 if it has not."""
    if is_list_of_images(batch):
        return len(batch)
    if not isinstance(batch, (Mapping, list, tuple)):
        return 0
    fields = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    lists = [one for one in fields if isinstance(one, (list, tuple)) and len(one)]
    are_listed = [is_list_of_images(one) or all(isinstance(item, Mapping) for item in one) for one in lists]
    return len(lists[0]) if len(lists) == len(fields) > 0 and all(are_listed) and len({*map(len, lists)}) == 1 else 0


def is_list_of_images(values: Any) -> bool:
    """Return whether these are images, of one or three channels, and not the fields of a batch of three samples.

    >>> is_list_of_images([torch.zeros(3, 20, 30), torch.zeros(3, 40, 20)])
    True
    """
    if type(values) not in (list, tuple) or not values or not all(isinstance(one, Tensor) for one in values):
        return False
    has_channels = all(one.ndim == 3 and one.shape[0] in (1, 3) and min(one.shape[1:]) >= 8 for one in values)
    return has_channels and (len(values) > 2 or len({one.shape for one in values}) > 1)


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Cut a batch along the first dimension of its tensors, and of its lists of as many items.

    Tensors and arrays are cut into views, not copied. Those without dimensions or with one row only, numbers, strings
    and None go to every part as they are. Dicts, lists, tuples, named tuples and dataclasses keep their type.

    Args:
        batch: of n samples.
        parts: at least 1. At most n parts are returned; their sizes differ by at most one, the larger come first.

    Raises:
        OptionError: a tensor's first dimension is not n, or an object cannot be cut at all.

    Example:
        >>> [part["x"].tolist() for part in split_batch({"x": torch.arange(5), "name": "five"}, 2)]
        [[0, 1, 2], [3, 4]]
    """
    size = count_samples(batch)
    parts = max(1, min(parts, size))
    if parts == 1:
        return [batch]
    return [_cut(batch, start, stop, size) for start, stop in part_bounds(size, parts)]


def part_bounds(size: int, parts: int) -> Iterator[tuple[int, int]]:
    """Yield the first sample of each part and the one after its last.

    >>> list(part_bounds(5, 2))
    [(0, 3), (3, 5)]
    """
    least, more = divmod(size, parts)
    start = 0
    for number in range(parts):
        stop = start + least + (number < more)
        yield start, stop
        start = stop


def bucket_of(batch: Any) -> tuple[Any, ...]:
    """Return the bucket of a batch: the dtype and the dimensions after the first, rounded up to powers of two.

    Batches of one bucket need about the same memory per sample.

    >>> bucket_of([torch.zeros(8, 100), torch.zeros(8)]) == bucket_of([torch.zeros(3, 128), torch.zeros(3)])
    True
    """
    return tuple((str(one.dtype), *(_power_of_two(int(size)) for size in one.shape[1:])) for one in arrays_of(batch))


def arrays_of(value: Any) -> Iterator[Tensor | np.ndarray]:
    """Yield all tensors and arrays inside a batch."""
    if isinstance(value, (Tensor, np.ndarray)):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from arrays_of(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from arrays_of(one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from arrays_of(getattr(value, field.name))


def mixes_single_rows(batch: Any, size: int) -> bool:
    """Return whether some tensors of a batch have one row, although it has more samples."""
    return size > 1 and any(one.ndim > 0 and one.shape[0] == 1 for one in arrays_of(batch))


def explain_single_row(size: int, *, is_known: bool) -> str:
    """Return why a batch with tensors of one row is not cut, and how to allow it."""
    seen = "the model's input has one row" if is_known else "it is not known which of them the model takes"
    return f"some of its tensors have {size} rows, others one, and {seen}, so samples cannot be told; {_SAY_DIMS}"


def batch_dependent_layers(model: nn.Module, allowed: LayerNames | bool = ()) -> list[tuple[str, nn.Module]]:
    """Return the layers, with their names, whose result for a sample depends on the other samples of its micro-batch.

    These are BatchNorm layers in training mode, and InstanceNorm layers that keep statistics, which would be updated
    more often. Those in `allowed` are left out.

    >>> [name for name, _ in batch_dependent_layers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))]
    ['1']
    >>> batch_dependent_layers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), allowed=["BatchNorm1d"])
    []
    """
    if isinstance(allowed, bool):
        allowed = (nn.Module,) if allowed else ()
    classes = tuple(one for one in allowed if isinstance(one, type))
    names = {one for one in allowed if isinstance(one, str)}
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if (isinstance(layer, _BatchNorm) or (isinstance(layer, _InstanceNorm) and layer.track_running_stats))
        and layer.training
        and not isinstance(layer, classes)
        and not {name, type(layer).__name__} & names
    ]


def explain_batch_dependence(dependent: list[tuple[str, nn.Module]]) -> str:
    """Return why a batch with such layers is not cut, and how to allow it."""
    name, layer = dependent[0]
    kind = type(layer).__name__
    more = f" and {len(dependent) - 1} more" if len(dependent) > 1 else ""
    return (
        f"{kind} ({name!r}{more}) computes over the samples of a micro-batch, so smaller ones give another result; "
        f"allow it with allow_batch_dependent=({kind!r},), or use a batch that fits"
    )


def _cut(value: Any, start: int, stop: int, size: int) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return _cut_array(value, start, stop, size)
    if isinstance(value, Mapping):
        return like_mapping(value, {key: _cut(one, start, stop, size) for key, one in value.items()})
    if isinstance(value, PackedSequence):
        raise OptionError(f"a PackedSequence in a batch cannot be cut; {_REMEDY}")
    if isinstance(value, (list, tuple)):
        if is_list_of_samples(value, size):
            return value[start:stop]
        parts = [_cut(one, start, stop, size) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: _cut(getattr(value, name), start, stop, size) for name in fields})
    if callable(getattr(value, "to", None)) or hasattr(value, "__next__"):
        raise OptionError(f"a {type(value).__name__} in a batch cannot be cut; {_REMEDY}")
    return value


def _cut_array(array: Tensor | np.ndarray, start: int, stop: int, size: int) -> Tensor | np.ndarray:
    if array.ndim == 0 or (array.shape[0] == 1 and size > 1):
        return array
    if isinstance(array, Tensor) and (array.is_nested or array.layout is not torch.strided):
        raise OptionError(f"a nested or sparse tensor in a batch cannot be cut; {_REMEDY}")
    if array.shape[0] != size:
        raise OptionError(
            f"a tensor of shape {tuple(array.shape)} in a batch of {size} samples cannot be cut by samples; {_REMEDY}"
        )
    return array[start:stop]


def is_list_of_samples(values: Sequence[Any], size: int) -> bool:
    """Return whether `values` holds one item for each sample, rather than tensors that hold all samples."""
    if hasattr(values, "_fields"):
        return False
    if len(values) == size and is_list_of_images(values):
        return True
    rows = [one.shape[0] for one in arrays_of(values) if one.ndim > 0]
    return len(values) == size and not (rows and set(rows) <= {size, 1} and size in rows)


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
