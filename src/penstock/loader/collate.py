"""`default_collate`'s result, written where it travels: in the arena of a slot.

The values, types and errors are torch's, because torch's own `collate` does the work, but for its entries for tensors
and arrays. Small samples are stacked at the end of a batch. Of large ones, each sample's tensors are copied to their
rows as soon as it is made (`BatchWriter`), so that no list of samples is held and no batch-sized temporary is
allocated: holding and stacking costs more than half of the gain, because the C heap grows and trims for every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from penstock.core.units import round_up
from penstock.loader.transport.arena import ALIGNMENT, Arena, ArenaFullError, view_tensor
from penstock.loader.transport.codec import INLINE_NBYTES

_TORCH_STACK = default_collate_fn_map[torch.Tensor]
_TORCH_ARRAYS = default_collate_fn_map[np.ndarray]

_TORCH_MAP = dict(default_collate_fn_map)

PLAIN_ARRAYS = (np.ndarray, np.memmap)
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


def collates_as_torch() -> bool:
    """Return whether `default_collate` is torch's own in all it does, and makes tensors on the host.

    A program may put functions into its map, or choose another default device.
    """
    now = default_collate_fn_map
    if now.get(torch.Tensor) is _stack_in_current_arena:  # which a worker puts there
        now = {**now, torch.Tensor: _TORCH_STACK}
    return now == _TORCH_MAP and _makes_tensors_on_host()


def _makes_tensors_on_host() -> bool:
    # To ask torch for its default device takes 5 µs, and it is kept as a mode.
    return not _get_current_function_mode_stack() or torch.get_default_device().type == "cpu"


def collate_samples(samples: Sequence[Any], arena: Arena | None) -> Any:
    """Return `default_collate(samples)`, its large tensors stacked in `arena` when there is one."""
    return collate(samples, collate_fn_map=collate_map(arena))


def fast_map() -> dict[Any, Callable[..., Any]]:
    """Return torch's map with functions for the most usual samples that do the same in less time.

    A function that the program has put into torch's map stays, and then nothing is replaced but how arrays are stacked.
    """
    if not _makes_tensors_on_host():
        return dict(default_collate_fn_map)
    own = collate_map(None)
    return {**own, torch.Tensor: _stack_usual} if collates_as_torch() else own


def in_arena(fast: dict[Any, Callable[..., Any]], arena: Arena) -> dict[Any, Callable[..., Any]]:
    """Return what `fast_map` has returned, with large tensors and arrays stacked in `arena`."""
    if fast[torch.Tensor] is not _stack_usual:
        return collate_map(arena)
    return {**fast, torch.Tensor: partial(_stack_in, arena), np.ndarray: partial(_stack_arrays, arena)}


def _stack_usual(batch: Any, *, collate_fn_map: Any = None) -> Any:
    first = batch[0]
    if first.layout is torch.strided and not first.is_nested and torch.utils.data.get_worker_info() is None:
        return torch.stack(batch, 0)
    return _TORCH_STACK(batch, collate_fn_map=collate_fn_map)


def _integers(batch: Any, *, collate_fn_map: Any = None) -> Any:
    kinds = set(map(type, batch))
    if kinds == {bool}:
        return _filled(batch, torch.bool)
    try:
        if kinds == {int}:
            return _filled(batch, torch.int64)
    except OverflowError:
        pass
    return _TORCH_MAP[int](batch, collate_fn_map=collate_fn_map)


def _floats(batch: Any, *, collate_fn_map: Any = None) -> Any:
    if set(map(type, batch)) == {float}:
        return _filled(batch, torch.float64)
    return _TORCH_MAP[float](batch, collate_fn_map=collate_fn_map)


def _numpy_scalars(batch: Any, *, collate_fn_map: Any = None) -> Any:
    first = batch[0]
    dtype = torch_dtype(first.dtype) if set(map(type, batch)) == {type(first)} else None
    return _TORCH_MAP[_NUMPY_SCALARS](batch) if dtype is None else _filled(batch, dtype)


def _filled(numbers: Any, dtype: torch.dtype) -> Tensor:
    """Return a tensor of numbers, in memory of torch's: a block of another size between large ones costs page faults.

    Where the C heap puts the next batch depends on it, and so whether the pages of the last one are used again. It
    is on the host whatever torch's default device is, as what is stacked beside it is.
    """
    filled = torch.empty(len(numbers), dtype=dtype, device="cpu")
    filled.numpy()[:] = numbers
    return filled


def _dicts(batch: Any, *, collate_fn_map: Any) -> Any:
    first = batch[0]
    if type(first) is not dict:
        return _with_torchs_containers(batch, collate_fn_map)
    return {key: collate([sample[key] for sample in batch], collate_fn_map=collate_fn_map) for key in first}


def _sequences(batch: Any, *, collate_fn_map: Any) -> Any:
    first = batch[0]
    if type(first) not in (tuple, list) or set(map(len, batch)) != {len(first)}:
        return _with_torchs_containers(batch, collate_fn_map)
    return [collate(column, collate_fn_map=collate_fn_map) for column in zip(*batch, strict=True)]


_NUMPY_SCALARS = (np.bool_, np.number, np.object_)
"""torch's key of them."""
_KINDS = tuple(np.dtype(letter).type for letter in "?bhilBHIefdFD")
"""Of numbers that torch makes tensors of; not of uint64, which it refuses one by one."""

_USUAL: dict[Any, Callable[..., Any]] = {
    int: _integers,
    float: _floats,
    dict: _dicts,
    tuple: _sequences,
    list: _sequences,
    **dict.fromkeys(_KINDS, _numpy_scalars),
}


def _with_torchs_containers(batch: Any, fast: dict[Any, Callable[..., Any]]) -> Any:
    """Collate samples of a subclass of dict, tuple or list, or such as torch refuses."""
    containers = (dict, tuple, list)
    return collate(batch, collate_fn_map={kind: made for kind, made in fast.items() if kind not in containers})


def collate_map(arena: Arena | None) -> dict[Any, Callable[..., Any]]:
    """Return torch's map of collate functions, with plain arrays stacked by NumPy, and large tensors in `arena`.

    Where the program has not changed the map, numbers and containers are collated by functions that take less time.
    """
    own = {**default_collate_fn_map, **_USUAL} if collates_as_torch() else dict(default_collate_fn_map)
    if own[np.ndarray] is _TORCH_ARRAYS:  # and not a function that the user has put there
        own[np.ndarray] = partial(_stack_arrays, arena)
    if arena is not None and own[torch.Tensor] in (_TORCH_STACK, _stack_in_current_arena):
        own[torch.Tensor] = partial(_stack_in, arena)
    return own


# In a worker process a user's collate_fn usually calls default_collate, and torch's would then make a shared segment
# for every tensor. There, and only there, torch's entry for tensors is replaced: they are stacked in the slot.
_current_arena: Arena | None = None


def stack_in_slots() -> None:
    """Make `default_collate` stack into the current arena from now on in this (worker) process."""
    if default_collate_fn_map[torch.Tensor] is _TORCH_STACK:
        default_collate_fn_map[torch.Tensor] = _stack_in_current_arena


def set_current_arena(arena: Arena | None) -> None:
    """Set the arena that `default_collate` may use; see `stack_in_slots`."""
    global _current_arena
    _current_arena = arena


def _stack_in_current_arena(batch: Any, *, collate_fn_map: Any = None) -> Any:
    if _current_arena is None:
        return _TORCH_STACK(batch, collate_fn_map=collate_fn_map)
    return _stack_in(_current_arena, batch, collate_fn_map=collate_fn_map)


def _stack_in(arena: Arena, batch: Any, *, collate_fn_map: Any = None) -> Any:
    first = batch[0]
    is_uniform = set(map(type, batch)) == {torch.Tensor} and len({tensor.dtype for tensor in batch}) == 1
    if not is_uniform or not is_dense(first):
        return _TORCH_STACK(batch, collate_fn_map=collate_fn_map)
    is_small = first.nbytes * len(batch) <= INLINE_NBYTES
    if not stacks_contiguously(first) or (is_small and first.is_contiguous()):
        stacked = torch.stack(batch, 0)
        # In a worker torch refuses to stack samples that require grad.
        return _TORCH_STACK(batch, collate_fn_map=collate_fn_map) if stacked.requires_grad else stacked
    try:
        if is_small:  # as torch does in a worker: as rows, whatever the order of the samples' dimensions
            return torch.stack(batch, 0, out=first.new_empty((len(batch), *first.shape)))
        return torch.stack(batch, 0, out=arena.tensor((len(batch), *first.shape), first.dtype))
    except ArenaFullError:
        return torch.stack(batch, 0)  # the codec then reports the size of slot that it takes
    except RuntimeError:  # sizes that differ, gradients: torch handles them, or raises its own error
        return _TORCH_STACK(batch, collate_fn_map=collate_fn_map)


def _stack_arrays(arena: Arena | None, batch: Any, *, collate_fn_map: Any = None) -> Any:
    """Stack arrays of one shape directly: a tensor for each would cost more, and warn about read-only ones."""
    first = batch[0]
    is_plain = {*map(type, batch)} <= {*PLAIN_ARRAYS} and first.flags.c_contiguous and first.size
    dtype = torch_dtype(first.dtype) if is_plain else None
    if dtype is None or {*map(_SHAPE, batch)} != {first.shape} or {*map(_DTYPE, batch)} != {first.dtype}:
        return _TORCH_ARRAYS([_writable(array) for array in batch], collate_fn_map=collate_fn_map)
    # One array after another, where there are dimensions: np.stack adds one to each array before.
    join = np.concatenate if first.ndim else np.stack
    shape = (len(batch), *first.shape)
    try:
        if arena is not None and first.nbytes * len(batch) > INLINE_NBYTES:
            tensor = arena.tensor(shape, dtype)
            join(batch, out=tensor.numpy().reshape(-1, *first.shape[1:]))
            return tensor
    except ArenaFullError:
        pass  # the codec then reports the size of slot that it takes
    return torch.from_numpy(join(batch).reshape(shape))  # in NumPy's memory, large parts of which are in huge pages


def _writable(value: Any) -> Any:
    return np.array(value) if isinstance(value, np.ndarray) and not value.flags.writeable else value


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is an ordinary strided one on the host, with all its elements in memory."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def stacks_contiguously(tensor: torch.Tensor) -> bool:
    """Return whether torch.stack would lay out a batch of these as rows (it keeps channels-last order, for one)."""
    return tensor.is_contiguous() or torch.utils.data.get_worker_info() is not None or _probe_stack(tensor)


def _probe_stack(tensor: torch.Tensor) -> bool:
    return torch.stack((tensor, tensor)).is_contiguous()


@cache
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """Return the dtype of `torch.as_tensor` of such an array, or None when it would refuse."""
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):
        return None


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
