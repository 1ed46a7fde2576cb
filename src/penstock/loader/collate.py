"""`default_collate`'s result, with large tensors stacked where they travel: in the arena of a slot.

The values, types and errors are torch's, because torch's own `collate` does the work. Only its entries for tensors and
arrays are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from penstock.loader.transport.arena import Arena, ArenaFullError
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
