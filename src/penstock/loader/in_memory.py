"""Datasets that lie in memory and only look up: a batch of them is one gather.

    torch.Tensor, numpy.ndarray     row i
    TensorDataset                   row i of each tensor
    Subset, ConcatDataset           of these (random_split makes Subsets)

These exact types only: a subclass may do anything. A gather gives what torch's `default_collate` makes of the samples:
the same bytes, dtypes, strides and containers, in memory of its own. It is proven on the first sample of each part.
What cannot be proven (other layouts, gradients, dtypes that cannot be gathered) has no gather, and a batch whose
indices are not whole numbers from 0 is left to torch's way, with its errors.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torch.utils.data._utils.collate import collate

from penstock.loader.collate import PLAIN_ARRAYS, collates_as_torch, fast_map, is_dense, torch_dtype

_ORIGINAL = {kind: kind.__getitem__ for kind in (TensorDataset, Subset, ConcatDataset)}

_DEEPEST = 16
"""How deep datasets may be nested: `dataset + other` in a loop nests a thousand, of which a gather gains nothing."""


class CannotGatherError(Exception):
    """These indices, or this dataset as it is now, must be fetched sample by sample."""


class _Rows(Protocol):
    """A dataset, as columns of rows. `take` reads the dataset as it is now, as its `__getitem__` would."""

    is_single: bool
    """Whether a sample is one value, and not a tuple of them."""
    kind: type
    """Of the dataset that holds the rows: samples of an array and of a tensor do not go into one batch."""

    def take(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Return a new tensor for each column; raises for indices that are not from 0 to the dataset's length."""
        ...

    def layout(self) -> list[tuple[Any, ...]]:
        """Return dtype and size of a row of each column; the parts of one dataset must agree."""
        ...

    def is_current(self) -> bool:
        """Return whether the dataset still consists of what was looked at."""
        ...


class Gather:
    """Makes batches of one dataset; see `gather_of`."""

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    def is_current(self) -> bool:
        """Return whether the dataset still consists of what was proven, and is still looked up by torch's methods."""
        are_original = all(kind.__getitem__ is original for kind, original in _ORIGINAL.items())
        return are_original and self._rows.is_current()

    def __call__(self, indices: Any) -> Any:
        """Return the batch of `indices`: an int64 tensor, or a list of ints.

        Raises:
            CannotGatherError: sample by sample it may work, or raises torch's error.
        """
        try:
            if type(indices) is not torch.Tensor:
                indices = _index_tensor(indices)
            if (indices.dtype, indices.dim(), indices.device.type) != (torch.int64, 1, "cpu"):
                raise CannotGatherError
            if not (len(indices) and self._rows.is_current()):
                raise CannotGatherError
            columns = self._rows.take(indices)
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise CannotGatherError from error
        return columns[0] if self._rows.is_single else columns


def gather_of(dataset: Any) -> Gather | None:
    """Return what gathers the batches of `dataset`; None where that is not proven to give what torch gives.

    >>> gather = gather_of(TensorDataset(torch.arange(4), torch.arange(4.0)))
    >>> gather([2, 0])
    [tensor([2, 0]), tensor([2., 0.])]
    """
    if not collates_as_torch():
        return None
    rows = _rows_of(dataset)
    return None if rows is None else Gather(rows)


# ── the types ───────────────────────────────────────────────────────────────────────────────────────────────


class _Tensors:
    kind: type

    def __init__(self, dataset: TensorDataset) -> None:
        self.is_single, self.kind = False, TensorDataset
        self._dataset = dataset
        self._tensors = dataset.tensors

    def take(self, indices: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.index_select(0, indices) for tensor in self._tensors]

    def layout(self) -> list[tuple[Any, ...]]:
        return [(tensor.dtype, *tensor.shape[1:]) for tensor in self._tensors]

    def is_current(self) -> bool:
        return self._dataset.tensors is self._tensors and not any(tensor.requires_grad for tensor in self._tensors)


class _Tensor:
    kind: type

    def __init__(self, dataset: torch.Tensor) -> None:
        self.is_single, self.kind = True, torch.Tensor
        self._dataset = dataset

    def take(self, indices: torch.Tensor) -> list[torch.Tensor]:
        return [self._dataset.index_select(0, indices)]

    def layout(self) -> list[tuple[Any, ...]]:
        return [(self._dataset.dtype, *self._dataset.shape[1:])]

    def is_current(self) -> bool:
        return not self._dataset.requires_grad


class _Array:
    kind: type

    def __init__(self, dataset: np.ndarray) -> None:
        self.is_single, self.kind = True, np.ndarray
        self._dataset = dataset

    def take(self, indices: torch.Tensor) -> list[torch.Tensor]:
        numbers = indices.numpy()
        if numbers.size and numbers.min() < 0:
            raise IndexError
        return [torch.from_numpy(np.asarray(self._dataset).take(numbers, axis=0))]

    def layout(self) -> list[tuple[Any, ...]]:
        return [(torch_dtype(self._dataset.dtype), *self._dataset.shape[1:])]

    def is_current(self) -> bool:
        return True


class _Subset:
    kind: type

    def __init__(self, dataset: Subset[Any], child: _Rows) -> None:
        self.is_single, self.kind = child.is_single, child.kind
        self._dataset = dataset
        self._child_dataset = dataset.dataset
        self._child = child

    def take(self, indices: torch.Tensor) -> list[torch.Tensor]:
        chosen: Any = self._dataset.indices  # a list may have changed since the last batch
        if type(chosen) is torch.Tensor and chosen.dtype is torch.int64 and chosen.dim() == 1:
            return self._child.take(chosen.index_select(0, indices))
        if type(chosen) not in (list, tuple, range):
            raise CannotGatherError
        numbers = indices.tolist()
        found = operator.itemgetter(*numbers)(chosen) if len(numbers) > 1 else [chosen[number] for number in numbers]
        return self._child.take(_index_tensor(found))

    def layout(self) -> list[tuple[Any, ...]]:
        return self._child.layout()

    def is_current(self) -> bool:
        return self._dataset.dataset is self._child_dataset and self._child.is_current()


class _Concat:
    kind: type

    def __init__(self, dataset: ConcatDataset[Any], children: list[_Rows]) -> None:
        self.is_single, self.kind = children[0].is_single, children[0].kind
        self._dataset = dataset
        self._datasets = list(dataset.datasets)
        self._children = children
        self._ends = np.array(dataset.cumulative_sizes)
        self._starts = [0, *dataset.cumulative_sizes]

    def take(self, indices: torch.Tensor) -> list[torch.Tensor]:
        numbers = indices.numpy()
        which = self._ends.searchsorted(numbers, "right")
        columns = [torch.empty(len(numbers), *size, dtype=dtype) for dtype, *size in self.layout()]
        for number in set(which.tolist()):
            places = np.flatnonzero(which == number)
            inner = torch.from_numpy(numbers[places] - self._starts[number])
            for column, part in zip(columns, self._children[number].take(inner), strict=True):
                column.index_copy_(0, torch.from_numpy(places), part)
        return columns

    def layout(self) -> list[tuple[Any, ...]]:
        return self._children[0].layout()

    def is_current(self) -> bool:
        now = self._dataset.datasets
        is_same = len(now) == len(self._datasets) and all(map(operator.is_, now, self._datasets))
        return is_same and all(child.is_current() for child in self._children)


def _rows_of(dataset: Any, deepest: int = _DEEPEST) -> _Rows | None:
    """Return the dataset as rows, if it is of one of the types and its batches are proven to be torch's."""
    kind = type(dataset)
    if not deepest:
        return None
    if kind in _ORIGINAL and (kind.__getitem__ is not _ORIGINAL[kind] or _has_own_getitems(dataset)):
        return None
    if kind is Subset:
        child = _rows_of(dataset.dataset, deepest - 1)
        return _Subset(dataset, child) if child is not None else None
    if kind is ConcatDataset:
        return _concatenated(dataset, deepest - 1)
    rows = _leaf_of(dataset)
    return rows if rows is not None and _is_proven(rows, dataset) else None


def _has_own_getitems(dataset: Any) -> bool:
    found, of_class = getattr(dataset, "__getitems__", None), getattr(type(dataset), "__getitems__", None)
    return found is not None and (of_class is None or getattr(found, "__func__", None) is not of_class)


def _leaf_of(dataset: Any) -> _Rows | None:
    if type(dataset) is torch.Tensor and dataset.dim() and _is_plain(dataset):
        return _Tensor(dataset)
    if type(dataset) is TensorDataset and all(map(_is_plain, dataset.tensors)):
        return _Tensors(dataset)
    if type(dataset) in PLAIN_ARRAYS and dataset.ndim and torch_dtype(dataset.dtype) is not None:
        # Whether torch can make a tensor of unsigned scalars depends on how large they are.
        is_unsigned = dataset.dtype.kind == "u" and dataset.dtype.itemsize > 1
        return None if dataset.ndim == 1 and is_unsigned else _Array(dataset)
    return None


def _concatenated(dataset: ConcatDataset[Any], deepest: int) -> _Rows | None:
    children = [_rows_of(part, deepest) for part in dataset.datasets]
    found = [child for child in children if child is not None]
    if len(found) < len(children) or any(
        (child.kind, child.layout()) != (found[0].kind, found[0].layout()) for child in found
    ):
        return None
    return _Concat(dataset, found)


def _is_plain(tensor: torch.Tensor) -> bool:
    has_names = any(getattr(tensor, "names", ()))  # before torch 2.13
    return type(tensor) is torch.Tensor and is_dense(tensor) and not tensor.requires_grad and not has_names


def _index_tensor(indices: Any) -> torch.Tensor:
    is_kept = isinstance(indices, Sequence)  # an iterator would be used up here
    if not is_kept or not set(map(type, indices)) <= {int}:  # True, say, is no number when it is an index
        raise CannotGatherError
    return torch.from_numpy(np.fromiter(indices, np.int64, len(indices)))


# ── the proof ───────────────────────────────────────────────────────────────────────────────────────────────


def _is_proven(rows: _Rows, dataset: Any) -> bool:
    """Return whether a batch of the first sample is what torch collates of it, down to strides and bytes."""
    try:
        collated = collate([dataset[0], dataset[0]], collate_fn_map=fast_map())
        gathered = rows.take(torch.tensor([0, 0]))
        return all(map(_is_same, [collated] if rows.is_single else collated, gathered))
    except Exception:  # noqa: BLE001  whatever it is, torch's way has it too, and there it is the user's to see
        return False


def _is_same(collated: torch.Tensor, gathered: torch.Tensor) -> bool:
    layout, other = ((one.dtype, one.shape, one.stride(), one.is_contiguous()) for one in (collated, gathered))
    return layout == other and layout[-1] and torch.equal(collated.view(torch.uint8), gathered.view(torch.uint8))
