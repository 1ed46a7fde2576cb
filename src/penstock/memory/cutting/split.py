"""Cutting a batch into micro-batches along its samples: by a guess, or as the user says; and layers that forbid it."""

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

Dims = int | Mapping[str, int | None]
"""One dimension for all tensors, or one per field; None for a field that goes to every part as it is."""

_REMEDY = "pass split= to cut it, and batch_size= to count its samples"


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
    guessed = BatchDims({})
    return [guessed.cut(batch, "", slice(*bounds), size) for bounds in part_bounds(size, parts)]


class BatchDims:
    """Counts and cuts the samples of batches along dimensions that were said.

    Args:
        dims: the dimension of all tensors, or a dict from fields to dimensions. Fields of nested batches are joined by
            dots ("inputs.mask"), places in lists and tuples are numbers ("0"), and what is said of a field holds for
            all in it. Fields that are not said are cut along their first dimension, and must have all samples there.

    Example:
        >>> dims = BatchDims({"frames": 1, "table": None})
        >>> batch = {"frames": torch.zeros(7, 4, 3), "label": torch.zeros(4), "table": torch.zeros(1, 9)}
        >>> [tuple(one.shape) for one in dims.split(batch, 2)[0].values()]
        [(7, 2, 3), (2,), (1, 9)]
    """

    def __init__(self, dims: Dims) -> None:
        given: Any = dims
        values = given.values() if isinstance(given, Mapping) else [given] if given is not None else [""]
        if not all(dim is None or type(dim) is int for dim in values):
            raise OptionError(
                f"batch_dims must be a dimension, or a dict from fields to dimensions or None, not {dims!r}"
            )
        self._dims: Mapping[str, int | None] = {"": dims} if isinstance(dims, int) else dict(dims)

    def count(self, batch: Any) -> int:
        """Return the number of samples.

        Raises:
            OptionError: fields have different numbers of samples, or a field that was said is not in the batch.
        """
        fields = dict(_named_arrays(batch, ""))
        said = {path: dim for path in fields for is_said, dim in [self._said(path)] if is_said}
        for name in self._dims:
            if name and not _has_field(batch, name):
                raise OptionError(
                    f"batch_dims names {name!r}, which is not in the batch; its fields are {list(fields)}"
                )
        sizes = {path: _rows(fields[path], dim, path) for path, dim in said.items() if dim is not None}
        if not sizes:
            sizes = {path: one.shape[0] for path, one in fields.items() if path not in said and one.ndim}
        if len(set(sizes.values())) != 1:
            raise OptionError(f"the fields of a batch have different numbers of samples: {sizes}; see batch_dims=")
        return int(next(iter(sizes.values())))

    def split(self, batch: Any, parts: int) -> list[Any]:
        """Cut a batch into views, as even as can be.

        Raises:
            OptionError: a field that was not said does not have all samples in its first dimension.
        """
        size = self.count(batch)
        parts = max(1, min(parts, size))
        if parts == 1:
            return [batch]
        return [self.cut(batch, "", slice(*bounds), size) for bounds in part_bounds(size, parts)]

    def _said(self, path: str) -> tuple[bool, int | None]:
        """Return whether anything was said of a field, and what."""
        while True:
            if path in self._dims:
                return True, self._dims[path]
            if not path:
                return False, None
            path = path.rpartition(".")[0]

    def cut(self, value: Any, path: str, part: slice, size: int) -> Any:
        """Return the samples `part` of what stands at `path` in a batch of `size` samples."""
        is_said, dim = self._said(path)
        if is_said and dim is None:
            return value
        if isinstance(value, (Tensor, np.ndarray)):
            return self._cut_array(value, path, part, size)
        if isinstance(value, Mapping):
            return like_mapping(value, {key: self.cut(one, _join(path, key), part, size) for key, one in value.items()})
        if isinstance(value, (list, tuple)) and not isinstance(value, PackedSequence):
            if is_list_of_samples(value, size):
                return value[part]
            items = [self.cut(one, _join(path, number), part, size) for number, one in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value) if field.init]
            cut = {name: self.cut(getattr(value, name), _join(path, name), part, size) for name in names}
            return dataclasses.replace(value, **cut)
        if callable(getattr(value, "to", None)) or hasattr(value, "__next__"):
            raise OptionError(f"a {type(value).__name__} in a batch cannot be cut; {self._remedy(path)}")
        return value

    def _remedy(self, path: str) -> str:
        whole = f"say batch_dims={{{path!r}: None}} if all of it goes to every part, or " if path else ""
        return f"{whole}{_REMEDY}"

    def _cut_array(self, array: Any, path: str, part: slice, size: int) -> Any:
        is_said, dim = self._said(path)
        if array.ndim == 0 or (not self._dims and array.shape[0] == 1 < size):
            return array
        if isinstance(array, Tensor) and (array.is_nested or array.layout is not torch.strided):
            raise OptionError(f"a nested or sparse tensor in a batch cannot be cut; {_REMEDY}")
        dim = dim or 0
        if not is_said and array.shape[0] != size:
            raise OptionError(
                f"{path or 'the batch'}, of shape {tuple(array.shape)}, does not have the {size} samples in its first "
                f"dimension; say batch_dims={{{path!r}: ...}}: their dimension, or None if all of it goes to every "
                "part, or pass split= to cut it"
            )
        if _rows(array, dim, path) != size:
            raise OptionError(
                f"{path} has {_rows(array, dim, path)} samples in dimension {dim}, and others have {size}"
            )
        return array[(slice(None),) * (dim % array.ndim) + (part,)]


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
    return (one for _, one in _named_arrays(value, ""))


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


def _named_arrays(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield all tensors and arrays inside a batch, with their paths."""
    if isinstance(value, (Tensor, np.ndarray)):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _named_arrays(one, _join(path, key))
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from _named_arrays(one, _join(path, number))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _named_arrays(getattr(value, field.name), _join(path, field.name))


def _has_field(batch: Any, name: str) -> bool:
    for key in name.split("."):
        if isinstance(batch, Mapping):
            found = [one for own, one in batch.items() if str(own) == key]
        elif isinstance(batch, (list, tuple)) and key.isdecimal():
            found = list(batch[int(key) : int(key) + 1])
        else:
            found = [getattr(batch, key)] if hasattr(batch, key) else []
        if not found:
            return False
        batch = found[0]
    return True


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _rows(array: Any, dim: int, path: str) -> int:
    if not -array.ndim <= dim < array.ndim:
        raise OptionError(
            f"{path or 'the batch'}, of shape {tuple(array.shape)}, has no dimension {dim}; see batch_dims="
        )
    return int(array.shape[dim])
