"""BatchDims: which dimension of each field of a batch has the samples, as the user says it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from penstock.core.errors import OptionError
from penstock.core.tree import like_mapping
from penstock.memory.cutting.split import is_list_of_samples, part_bounds

Dims = int | Mapping[str, int | None]
"""One dimension for all tensors, or one per field; None for a field that goes to every part as it is."""


class BatchDims:
    """Counts and cuts the samples of batches along dimensions that were said.

    Args:
        dims: the dimension of all tensors, or a dict from fields to dimensions. Fields of nested batches are joined by
            dots ("inputs.mask"), places in lists and tuples are numbers ("0"), and what is said of a field holds for
            all in it. Fields that are not said are cut along their first dimension, and must have all samples there.

    Example:
        >>> import torch
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
        fields = dict(_arrays(batch, ""))
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
        return [self._cut(batch, "", slice(*bounds), size) for bounds in part_bounds(size, parts)]

    def _said(self, path: str) -> tuple[bool, int | None]:
        """Return whether anything was said of a field, and what."""
        while True:
            if path in self._dims:
                return True, self._dims[path]
            if not path:
                return False, None
            path = path.rpartition(".")[0]

    def _cut(self, value: Any, path: str, part: slice, size: int) -> Any:
        is_said, dim = self._said(path)
        if is_said and dim is None:
            return value
        if isinstance(value, (Tensor, np.ndarray)):
            return self._cut_array(value, path, part, size)
        if isinstance(value, Mapping):
            return like_mapping(
                value, {key: self._cut(one, _join(path, key), part, size) for key, one in value.items()}
            )
        if isinstance(value, (list, tuple)):
            if is_list_of_samples(value, size):
                return value[part]
            items = [self._cut(one, _join(path, number), part, size) for number, one in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value) if field.init]
            cut = {name: self._cut(getattr(value, name), _join(path, name), part, size) for name in names}
            return dataclasses.replace(value, **cut)
        if callable(getattr(value, "to", None)) or hasattr(value, "__next__"):
            raise OptionError(
                f"{path or 'the batch'}, a {type(value).__name__}, cannot be cut; say batch_dims={{{path!r}: None}} if "
                "all of it goes to every part, or pass split= to cut it"
            )
        return value

    def _cut_array(self, array: Any, path: str, part: slice, size: int) -> Any:
        is_said, dim = self._said(path)
        if array.ndim == 0:
            return array
        if not is_said and array.shape[0] != size:
            raise OptionError(
                f"{path or 'the batch'}, of shape {tuple(array.shape)}, does not have the {size} samples in its first "
                f"dimension; say batch_dims={{{path!r}: ...}}: their dimension, or None if all of it goes to every part"
            )
        dim = dim or 0
        if _rows(array, dim, path) != size:
            raise OptionError(
                f"{path} has {_rows(array, dim, path)} samples in dimension {dim}, and others have {size}"
            )
        return array[(slice(None),) * (dim % array.ndim) + (part,)]


def _arrays(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield all tensors and arrays inside a batch, with their paths."""
    if isinstance(value, (Tensor, np.ndarray)):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _arrays(one, _join(path, key))
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from _arrays(one, _join(path, number))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _arrays(getattr(value, field.name), _join(path, field.name))


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
