"""Samples → one batch, written straight into a slot.

The result is `default_collate`'s, bit for bit and type for type. What differs is where it lies and when it is
written: each sample's tensors are copied to their rows of the slot as soon as the sample is made, so that no list of
samples is held and no batch-sized temporary is allocated (holding and stacking costs more than half of the gain,
because the C heap grows and trims for every batch). Everything that is not a plain tensor or array is kept as a
column and given to torch's own `collate`. A sample that does not fit the first one's mould makes the writer give back
all samples, and torch's collate has the last word, with its own error messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from penstock.core.batch import BatchSpec, ColumnSpec, DictSpec, RowsSpec, SequenceSpec, build, leaves
from penstock.core.units import round_up
from penstock.feed.transport.codec import INBAND_NBYTES
from penstock.feed.transport.room import ALIGNMENT, NoRoomError, Room, view_tensor

_LARGE_SAMPLE_NBYTES = 65_536
_TORCH_STACK = default_collate_fn_map[torch.Tensor]
_TORCH_ARRAYS = default_collate_fn_map[np.ndarray]


class _MismatchError(Exception):
    """A sample does not have the first sample's shape."""


class _Node(Protocol):
    """One place of a sample: takes what each sample has there, and can give it back."""

    def write(self, row: int, value: Any) -> None: ...

    def read(self, row: int) -> Any: ...

    def spec(self) -> BatchSpec: ...


class _TensorRows:
    """A plain tensor of the same size and dtype in every sample: the rows of one tensor in the slot."""

    def __init__(self, value: torch.Tensor, total: int, room: Room) -> None:
        self.size = value.shape
        self.dtype = value.dtype
        self.out = room.tensor((total, *value.shape), value.dtype)
        self.offset = room.offset_of(self.out.data_ptr(), 0) or 0

    def write(self, row: int, value: Any) -> None:
        if type(value) is not torch.Tensor or value.shape != self.size or value.dtype is not self.dtype:
            raise _MismatchError
        if value.requires_grad or not _is_dense(value):
            raise _MismatchError
        self.out[row].copy_(value)

    def read(self, row: int) -> torch.Tensor:
        return self.out[row].clone()

    def spec(self) -> RowsSpec:
        return RowsSpec(self.offset, tuple(self.out.shape), self.dtype)


class _ArrayRows:
    """A NumPy array of the same shape and dtype in every sample: likewise, and a tensor in the batch."""

    def __init__(self, value: np.ndarray, dtype: torch.dtype, total: int, room: Room) -> None:
        self.shape = value.shape
        self.dtype = value.dtype
        self.tensor = room.tensor((total, *value.shape), dtype)
        self.out = self.tensor.numpy()
        self.offset = room.offset_of(self.tensor.data_ptr(), 0) or 0

    def write(self, row: int, value: Any) -> None:
        if type(value) not in _PLAIN_ARRAYS or value.shape != self.shape or value.dtype != self.dtype:
            raise _MismatchError
        self.out[row] = value

    def read(self, row: int) -> np.ndarray:
        return np.array(self.out[row])

    def spec(self) -> RowsSpec:
        return RowsSpec(self.offset, tuple(self.tensor.shape), self.tensor.dtype)


class _Column:
    """Anything else: a list, for torch's collate."""

    def __init__(self, columns: list[list[Any]], start: int, as_tuple: bool) -> None:
        self.as_tuple = as_tuple
        self.number = len(columns)
        self.start = start
        self.values: list[Any] = []
        columns.append(self.values)

    def write(self, row: int, value: Any) -> None:
        self.values.append(value)

    def read(self, row: int) -> Any:
        return self.values[row - self.start]

    def spec(self) -> ColumnSpec:
        return ColumnSpec(self.number, self.as_tuple)


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

    def spec(self) -> DictSpec:
        return DictSpec(tuple((key, part.spec()) for key, part in self.parts.items()))


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

    def spec(self) -> SequenceSpec:
        named = self.type if hasattr(self.type, "_fields") else None
        return SequenceSpec(tuple(part.spec() for part in self.parts), named)


def room_needed(sample: Any, total: int) -> tuple[int, bool]:
    """Return the bytes of room for a batch of `total` samples like this one, and whether to copy them as they come.

    Bytes: 0 when no slot would pay. A copy by itself costs about 5 µs, which small samples save by being stacked at
    the end; a list of large samples costs fresh pages for every batch.
    """
    sizes = _array_nbytes(sample)
    nbytes = sum(sizes)
    if nbytes * total <= INBAND_NBYTES:
        return 0, False
    return sum(round_up(size * total, ALIGNMENT) for size in sizes) + ALIGNMENT, nbytes >= _LARGE_SAMPLE_NBYTES


class BatchWriter:
    """Collates samples one by one into `room`, as rows `start`, `start + 1` ... of a batch of `total`.

    The room must have what `room_needed` says.
    """

    def __init__(self, first_sample: Any, total: int, room: Room, start: int = 0) -> None:
        self._columns: list[list[Any]] = []
        self._root = _plan(first_sample, total, room, self._columns, start)
        self._room = room
        self._start = start
        self._count = 0
        self._misfits: list[Any] | None = None

    def add(self, sample: Any) -> None:
        """Write one sample to the next row."""
        if self._misfits is not None:
            self._misfits.append(sample)
            return
        row = self._start + self._count
        try:
            self._root.write(row, sample)
        except _MismatchError:
            # Columns left of the misfit have taken their part of it already; `read` of the rows before does not see it.
            self._misfits = [*(self._root.read(earlier) for earlier in range(self._start, row)), sample]
            return
        self._count += 1

    def sample(self, number: int) -> Any:
        """Return sample `number` of those added so far, copied."""
        if self._misfits is not None:
            return self._misfits[number]
        return self._root.read(self._start + number)

    def finish(self) -> Any:
        """Return the batch of all samples that were added."""
        if self._misfits is not None:
            return collate(self._misfits, collate_fn_map=collate_map(self._room))
        return assemble(self._root.spec(), self._columns, self._room, rows=self._count)

    def finish_part(self) -> tuple[BatchSpec, list[list[Any]]]:
        """Return where this part's rows lie, and its columns; `merge` makes a batch of all parts."""
        if self._misfits is not None:
            return ColumnSpec(0), [self._misfits]
        return self._root.spec(), self._columns


def merge(parts: Sequence[tuple[BatchSpec, list[list[Any]]]], room: Room) -> Any:
    """Return the batch that several workers filled, part by part in the order of its rows; all specs are equal."""
    columns = [list(itertools.chain(*pieces)) for pieces in zip(*(columns for _, columns in parts), strict=True)]
    return assemble(parts[0][0], columns, room)


def assemble(spec: BatchSpec, columns: list[list[Any]], room: Room, *, rows: int | None = None) -> Any:
    """Return the batch that `spec` describes: its tensors are views of the first `rows` rows in `room`."""
    stackers = collate_map(room)

    def value(leaf: RowsSpec | ColumnSpec) -> Any:
        if isinstance(leaf, ColumnSpec):
            column = columns[leaf.number]
            return collate(tuple(column) if leaf.as_tuple else column, collate_fn_map=stackers)
        tensor = view_tensor(room.memory, leaf.offset, leaf.size, leaf.dtype)
        return tensor if rows is None or rows == leaf.size[0] else tensor[:rows]

    return build(spec, [value(leaf) for leaf in leaves(spec)])


def collate_samples(samples: Sequence[Any], room: Room | None) -> Any:
    """Return `default_collate(samples)`, its large tensors stacked in `room` when there is one."""
    return collate(samples, collate_fn_map=collate_map(room))


def collate_map(room: Room | None) -> dict[Any, Callable[..., Any]]:
    """Return torch's map of collate functions, with plain arrays stacked by NumPy, and large tensors in `room`."""
    own = dict(default_collate_fn_map)
    if own[np.ndarray] is _TORCH_ARRAYS:  # and not a function that the user has put there
        own[np.ndarray] = partial(_stack_arrays, room)
    if room is not None and own[torch.Tensor] in (_TORCH_STACK, _stack_in_current_room):
        own[torch.Tensor] = partial(_stack_in, room)
    return own


# In a worker process a user's collate_fn usually calls default_collate; torch's would then make a shared segment for
# every tensor. There, and only there, torch's entry for tensors is replaced, so that they are stacked in the slot.
_current_room: Room | None = None


def stack_in_slots() -> None:
    """Make `default_collate` stack into the current slot from now on in this (worker) process."""
    if default_collate_fn_map[torch.Tensor] is _TORCH_STACK:
        default_collate_fn_map[torch.Tensor] = _stack_in_current_room


def set_current_room(room: Room | None) -> None:
    """Say which slot `default_collate` may use; see `stack_in_slots`."""
    global _current_room
    _current_room = room


def _stack_in_current_room(batch: Any, *, collate_fn_map: Any = None) -> Any:
    if _current_room is None:
        return _TORCH_STACK(batch, collate_fn_map=collate_fn_map)
    return _stack_in(_current_room, batch, collate_fn_map=collate_fn_map)


def _stack_in(room: Room, batch: Any, *, collate_fn_map: Any = None) -> Any:
    first = batch[0]
    alike = set(map(type, batch)) == {torch.Tensor} and len({tensor.dtype for tensor in batch}) == 1
    if not alike or not _is_dense(first):
        return _TORCH_STACK(batch, collate_fn_map=collate_fn_map)
    if not _stacks_contiguously(first):
        return torch.stack(batch, 0)
    if first.nbytes * len(batch) <= INBAND_NBYTES:
        return torch.stack(batch, 0)
    try:
        return torch.stack(batch, 0, out=room.tensor((len(batch), *first.shape), first.dtype))
    except NoRoomError:
        return torch.stack(batch, 0)  # the codec will find out how large a slot it takes
    except RuntimeError:  # sizes that differ, gradients: torch does or says what is right
        return _TORCH_STACK(batch, collate_fn_map=collate_fn_map)


def _stack_arrays(room: Room | None, batch: Any, *, collate_fn_map: Any = None) -> Any:
    """Stack arrays of one shape as they are: a tensor of each would cost more, and a warning where one is read-only."""
    first = batch[0]
    is_plain = {*map(type, batch)} <= {*_PLAIN_ARRAYS} and first.flags.c_contiguous
    dtype = _torch_dtype(first.dtype) if is_plain else None
    if dtype is None or any(array.shape != first.shape or array.dtype != first.dtype for array in batch):
        return _TORCH_ARRAYS([_writable(array) for array in batch], collate_fn_map=collate_fn_map)
    if room is None or first.nbytes * len(batch) <= INBAND_NBYTES:
        return torch.from_numpy(np.stack(batch))
    try:
        tensor = room.tensor((len(batch), *first.shape), dtype)
    except NoRoomError:
        return torch.from_numpy(np.stack(batch))  # the codec will find out how large a slot it takes
    np.stack(batch, out=tensor.numpy())
    return tensor


def _writable(value: Any) -> Any:
    return np.array(value) if isinstance(value, np.ndarray) and not value.flags.writeable else value


def _plan(
    value: Any, total: int, room: Room, columns: list[list[Any]], start: int, *, in_sequence: bool = False
) -> _Node:
    if _is_plain(value) and _stacks_contiguously(value):
        return _TensorRows(value, total, room)
    if type(value) in _PLAIN_ARRAYS and (dtype := _torch_dtype(value.dtype)) is not None:
        return _ArrayRows(value, dtype, total, room)
    if type(value) is dict:
        return _Dict({key: _plan(part, total, room, columns, start) for key, part in value.items()})
    if _is_plain_sequence(value):
        return _Sequence(type(value), [_plan(part, total, room, columns, start, in_sequence=True) for part in value])
    return _Column(columns, start, in_sequence)


def _array_nbytes(value: Any) -> list[int]:
    """Return the bytes of each array in `value` that `_plan` would give rows to."""
    if _is_plain(value) or (type(value) in _PLAIN_ARRAYS and _torch_dtype(value.dtype) is not None):
        return [value.nbytes]
    if type(value) is dict:
        return [nbytes for part in value.values() for nbytes in _array_nbytes(part)]
    if _is_plain_sequence(value):
        return [nbytes for part in value for nbytes in _array_nbytes(part)]
    return []


_PLAIN_ARRAYS = (np.ndarray, np.memmap)


def _is_plain_sequence(value: Any) -> bool:
    return type(value) in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _is_plain(value: Any) -> bool:
    """Return whether `value` is a tensor that its bytes, dtype and size describe completely."""
    return type(value) is torch.Tensor and not value.requires_grad and _is_dense(value)


def _is_dense(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _stacks_contiguously(tensor: torch.Tensor) -> bool:
    """Return whether torch.stack would lay out a batch of these as rows (it keeps channels-last order, for one)."""
    return tensor.is_contiguous() or torch.utils.data.get_worker_info() is not None or _probe_stack(tensor)


def _probe_stack(tensor: torch.Tensor) -> bool:
    return torch.stack((tensor, tensor)).is_contiguous()


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """Return the dtype of `torch.as_tensor` of such an array, or None when it would refuse."""
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):
        return None
