"""Samples written one by one into the rows of a batch that lies in a slot.

The result is `default_collate`'s, bit for bit and type for type. What differs is where it lies and when it is written:
each sample's tensors are copied to their rows as soon as the sample is made, so that no list of samples is held and no
batch-sized temporary is allocated. (Holding and stacking costs more than half of the gain, because the C heap grows and
trims for every batch.) Everything that is not a plain tensor or array is kept as a column and given to torch's own
`collate`. A sample that does not have the first one's layout makes the writer return all samples, and torch's collate
decides, with its own error messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data._utils.collate import collate

from penstock.core.units import round_up
from penstock.loader.collate import PLAIN_ARRAYS, collate_map, is_dense, stacks_contiguously, torch_dtype
from penstock.loader.transport.arena import ALIGNMENT, Arena, view_tensor
from penstock.loader.transport.codec import INLINE_NBYTES

_LARGE_SAMPLE_NBYTES = 65_536

Stackers = dict[Any, Callable[..., Any]]
"""What torch's `collate` calls, by type; see `collate_map`."""


class _MismatchError(Exception):
    """A sample does not have the first sample's shape."""


class _Node(Protocol):
    """One leaf or container of a sample's tree: writes what each sample has there, and can read it back."""

    def write(self, row: int, value: Any) -> None: ...

    def read(self, row: int) -> Any: ...

    def batch(self, rows: int, arena: Arena, stackers: Stackers) -> Any:
        """Return what the batch of the first `rows` samples has there."""
        ...


class _Rows:
    """The rows of one tensor in the slot."""

    def __init__(self, tensor: torch.Tensor, arena: Arena) -> None:
        self.tensor = tensor
        self._offset = arena.offset_of(tensor.data_ptr(), 0) or 0

    def batch(self, rows: int, arena: Arena, stackers: Stackers) -> torch.Tensor:
        return view_tensor(arena.memory, self._offset, (rows, *self.tensor.shape[1:]), self.tensor.dtype)


class _TensorRows(_Rows):
    """A plain tensor of the same size and dtype in every sample."""

    def __init__(self, value: torch.Tensor, total: int, arena: Arena) -> None:
        super().__init__(arena.tensor((total, *value.shape), value.dtype), arena)
        self.size = value.shape
        self.dtype = value.dtype

    def write(self, row: int, value: Any) -> None:
        if type(value) is not torch.Tensor or value.shape != self.size or value.dtype is not self.dtype:
            raise _MismatchError
        if value.requires_grad or not is_dense(value):
            raise _MismatchError
        self.tensor[row].copy_(value)

    def read(self, row: int) -> torch.Tensor:
        return self.tensor[row].clone()


class _ArrayRows(_Rows):
    """A NumPy array of the same shape and dtype in every sample; the batch has a tensor."""

    def __init__(self, value: np.ndarray, dtype: torch.dtype, total: int, arena: Arena) -> None:
        super().__init__(arena.tensor((total, *value.shape), dtype), arena)
        self.shape = value.shape
        self.dtype = value.dtype
        self.out = self.tensor.numpy()

    def write(self, row: int, value: Any) -> None:
        if type(value) not in PLAIN_ARRAYS or value.shape != self.shape or value.dtype != self.dtype:
            raise _MismatchError
        self.out[row] = value

    def read(self, row: int) -> np.ndarray:
        return np.array(self.out[row])


class _Column:
    """Anything else, which torch's collate turns into a batch.

    It gets the column of a sequence's field as a tuple, of a mapping's as a list, and keeps that for text.
    """

    def __init__(self, as_tuple: bool) -> None:
        self.as_tuple = as_tuple
        self.values: list[Any] = []

    def write(self, row: int, value: Any) -> None:
        self.values.append(value)

    def read(self, row: int) -> Any:
        return self.values[row]

    def batch(self, rows: int, arena: Arena, stackers: Stackers) -> Any:
        return collate(tuple(self.values) if self.as_tuple else self.values, collate_fn_map=stackers)


class _Dict:
    def __init__(self, parts: dict[Any, _Node]) -> None:
        self.parts = parts

    def write(self, row: int, value: Any) -> None:
        if type(value) is not dict:
            raise _MismatchError
        for key, part in self.parts.items():
            if key not in value:
                raise _MismatchError
            part.write(row, value[key])

    def read(self, row: int) -> dict[Any, Any]:
        return {key: part.read(row) for key, part in self.parts.items()}

    def batch(self, rows: int, arena: Arena, stackers: Stackers) -> dict[Any, Any]:
        return {key: part.batch(rows, arena, stackers) for key, part in self.parts.items()}


class _Sequence:
    def __init__(self, type_: Any, parts: list[_Node]) -> None:
        self.type = type_
        self.parts = parts

    def write(self, row: int, value: Any) -> None:
        if type(value) is not self.type or len(value) != len(self.parts):
            raise _MismatchError
        for part, item in zip(self.parts, value, strict=True):
            part.write(row, item)

    def read(self, row: int) -> Any:
        items = [part.read(row) for part in self.parts]
        return self.type(*items) if hasattr(self.type, "_fields") else self.type(items)

    def batch(self, rows: int, arena: Arena, stackers: Stackers) -> Any:
        items = [part.batch(rows, arena, stackers) for part in self.parts]
        return self.type(*items) if hasattr(self.type, "_fields") else items  # of a tuple a list, as in torch's collate


def arena_needed(sample: Any, total: int) -> tuple[int, bool]:
    """Return the arena size in bytes for a batch of `total` such samples, and whether to copy them as they come.

    The size is 0 when no slot would pay. A copy by itself costs about 5 µs, which small samples save by being stacked
    at the end; a list of large samples costs fresh pages for every batch.
    """
    sizes = array_nbytes(sample)
    nbytes = sum(sizes)
    if nbytes * total <= INLINE_NBYTES:
        return 0, False
    return sum(round_up(size * total, ALIGNMENT) for size in sizes) + ALIGNMENT, nbytes >= _LARGE_SAMPLE_NBYTES


class BatchWriter:
    """Collates samples one by one into `arena`, as the rows of a batch of `total`.

    The arena must have the size that `arena_needed` returns.
    """

    def __init__(self, first_sample: Any, total: int, arena: Arena) -> None:
        self._root = _make_node(first_sample, total, arena)
        self._arena = arena
        self._count = 0
        self._misfits: list[Any] | None = None

    def add(self, sample: Any) -> None:
        """Write one sample to the next row."""
        if self._misfits is not None:
            self._misfits.append(sample)
            return
        row = self._count
        try:
            self._root.write(row, sample)
        except _MismatchError:
            # Columns to the left have taken their part of the misfit already; reading earlier rows does not see it.
            self._misfits = [*(self._root.read(earlier) for earlier in range(row)), sample]
            return
        self._count += 1

    def finish(self) -> Any:
        """Return the batch of all samples that were added."""
        if self._misfits is not None:
            return collate(self._misfits, collate_fn_map=collate_map(self._arena))
        return self._root.batch(self._count, self._arena, collate_map(self._arena))


def _make_node(value: Any, total: int, arena: Arena, *, in_sequence: bool = False) -> _Node:
    if _is_plain(value) and stacks_contiguously(value):
        return _TensorRows(value, total, arena)
    if type(value) in PLAIN_ARRAYS and (dtype := torch_dtype(value.dtype)) is not None:
        return _ArrayRows(value, dtype, total, arena)
    if type(value) is dict:
        return _Dict({key: _make_node(part, total, arena) for key, part in value.items()})
    if _is_plain_sequence(value):
        return _Sequence(type(value), [_make_node(part, total, arena, in_sequence=True) for part in value])
    return _Column(in_sequence)


def array_nbytes(value: Any) -> list[int]:
    """Return the bytes of each array in `value` that `_make_node` would give rows to."""
    if _is_plain(value) or (type(value) in PLAIN_ARRAYS and torch_dtype(value.dtype) is not None):
        return [value.nbytes]
    if type(value) is dict:
        return [nbytes for part in value.values() for nbytes in array_nbytes(part)]
    if _is_plain_sequence(value):
        return [nbytes for part in value for nbytes in array_nbytes(part)]
    return []


def _is_plain_sequence(value: Any) -> bool:
    return type(value) in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _is_plain(value: Any) -> bool:
    """Return whether `value` is a tensor that its bytes, dtype and size describe completely."""
    return type(value) is torch.Tensor and not value.requires_grad and is_dense(value)
