"""Plain trees: what most batches are, described without asking pickle about each of their tensors.

A plain tree is a tensor on the host, or a list, tuple or dict (these exact types) of plain trees, numbers, strings,
bytes and None. No two of its tensors are views of one storage. Its description has a node for each container and
tensor, a tuple whose first element says which; all else stands for itself. Pickling the description costs 2 µs,
pickling a tensor with a reducer of ours 40 µs. What begins with many containers without a tensor is left to pickle,
which walks through those in C.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch

_ATOMS = frozenset({int, float, bool, str, bytes, NoneType})
_WHOLE_STORAGE_RATIO = 8
_SMALL_STORAGE_NBYTES = 16_384
_MOST_WITHOUT_TENSORS = 8
"""Containers."""
_AS_IT_IS, _TENSOR, _EMPTY, _LIST, _TUPLE, _DICT = range(6)
_NAMES = {value: name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _NotPlainError(Exception):
    """The batch has something else in it."""


def describe(batch: Any, *, shares: bool = False) -> tuple[Any, list[torch.Tensor]] | None:
    """Return the description of a plain tree, and the memory of each of its tensors in order; None of any other batch.

    With `shares`, a batch with a tensor in shared memory is another one: that has to arrive as the same memory.

    A tree that has the same object or storage in two places is not plain: there it must come back as one, too.

    >>> node, tensors = describe([torch.zeros(2, 3), 5])
    >>> rebuild(node, lambda number, dtype, count: tensors[number].view(-1))
    [tensor([[0., 0., 0.],
            [0., 0., 0.]]), 5]
    """
    tensors: list[torch.Tensor] = []
    seen: list[int] = []
    try:
        node = _node(batch, tensors, seen)
        if shares and any(tensor.untyped_storage().is_shared() for tensor in tensors):
            return None
    except _NotPlainError:
        return None
    return (node, tensors) if len(set(seen)) == len(seen) else None


class TensorNode(NamedTuple):
    """A tensor of a description."""

    dtype: torch.dtype
    elements: int
    """That lie one after the other in memory."""
    size: tuple[int, ...]
    stride: tuple[int, ...] | None
    """None where they lie in rows, as contiguous tensors do."""
    requires_grad: bool

    @property
    def is_flat(self) -> bool:
        """Whether its elements are all that it is."""
        return len(self.size) == 1 and self.stride is None and not self.requires_grad

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor whose elements are those of `flat`, in one dimension."""
        return shaped(flat, self.size, self.stride, self.requires_grad)


Build = Callable[[Sequence[torch.Tensor]], Any]
"""Puts a tree together from its tensors, those that have elements, in order."""


def compiled(node: Any) -> tuple[list[TensorNode], Build]:
    """Return the tensors of a description, and what builds its tree of them, again and again.

    >>> node, flat = describe({"x": torch.zeros(2, 2), "y": 5})
    >>> (tensor,), build = compiled(node)
    >>> build([tensor.of(flat[0].view(-1))])
    {'x': tensor([[0., 0.],
            [0., 0.]]), 'y': 5}
    """
    tensors: list[TensorNode] = []
    return tensors, _build_of(node, tensors)


def has_empty(node: Any) -> bool:
    """Return whether a description has a tensor without elements, which is none of those that `compiled` returns."""
    if type(node) is not tuple or node[0] in (_TENSOR, _AS_IT_IS):
        return False
    return node[0] == _EMPTY or any(map(has_empty, node[-1]))


def rebuild(node: Any, memory: Callable[[int, torch.dtype, int], torch.Tensor]) -> Any:
    """Return the tree that `node` describes; `memory` gives that of a tensor by its number, dtype and element count."""
    tensors, build = compiled(node)
    return build([tensor.of(memory(number, tensor.dtype, tensor.elements)) for number, tensor in enumerate(tensors)])


def _build_of(node: Any, tensors: list[TensorNode]) -> Build:
    if type(node) is not tuple:
        return lambda _: node
    kind, *parts = node
    if kind == _TENSOR:
        dtype, size, stride, count, requires_grad = parts
        tensors.append(TensorNode(getattr(torch, dtype), count, size, stride, requires_grad))
        return operator.itemgetter(len(tensors) - 1)
    if kind == _EMPTY:
        return lambda _: empty(getattr(torch, parts[0]), *parts[1:])
    if kind == _AS_IT_IS:
        value = parts[0]
        return lambda _: [*value] if type(value) is list else value
    start, children = len(tensors), parts[-1]
    builds = [_build_of(child, tensors) for child in children]
    if len(tensors) - start == len(children) and all(type(build) is operator.itemgetter for build in builds):
        place = slice(start, len(tensors))  # most batches: a container of nothing but tensors
        if kind == _DICT:
            return lambda all_tensors: dict(zip(parts[0], all_tensors[place], strict=True))
        return lambda all_tensors: list(all_tensors[place]) if kind == _LIST else tuple(all_tensors[place])
    if kind == _DICT:
        return lambda all_tensors: {key: build(all_tensors) for key, build in zip(parts[0], builds, strict=True)}
    made = list if kind == _LIST else tuple
    return lambda all_tensors: made([build(all_tensors) for build in builds])


def _node(value: Any, tensors: list[torch.Tensor], seen: list[int]) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    seen.append(id(value))
    if kind is torch.Tensor:
        return _tensor_node(value, tensors, seen)
    if len(seen) > _MOST_WITHOUT_TENSORS and not tensors:
        raise _NotPlainError
    if kind is dict:
        if not _ATOMS.issuperset(map(type, value)):
            raise _NotPlainError
        return _DICT, [*value], [_node(part, tensors, seen) for part in value.values()]
    if kind is list or kind is tuple:
        if _ATOMS.issuperset(map(type, value)):
            return _AS_IT_IS, value
        return _LIST if kind is list else _TUPLE, [_node(part, tensors, seen) for part in value]
    raise _NotPlainError


def _tensor_node(tensor: torch.Tensor, tensors: list[torch.Tensor], seen: list[int]) -> Any:
    if not is_plain(tensor):
        raise _NotPlainError
    storage = tensor.untyped_storage()
    if tensor.nbytes != storage.nbytes() and takes_storage_along(tensor):
        raise _NotPlainError
    seen.append(storage._cdata)
    size = tuple(tensor.size())
    if tensor.numel() == 0:
        return _EMPTY, _NAMES[tensor.dtype], size, tuple(tensor.stride()), tensor.requires_grad
    flat, stride = memory_of(tensor)
    tensors.append(flat)
    return _TENSOR, _NAMES[tensor.dtype], size, stride, flat.numel(), tensor.requires_grad


# ── one tensor ──────────────────────────────────────────────────────────────────────────────────────────────


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether bytes, dtype, size and strides describe `tensor` completely."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and (tensor.is_leaf or not tensor.requires_grad)
        and not tensor.__dict__
        and not torch._is_functional_tensor(tensor)
    )


def takes_storage_along(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor travels with its whole storage, as all tensors do with torch.

    So strides and offset stay as they are, and two views of one storage stay views of one. A storage that is much
    larger than the tensor may be all of the data: then only the tensor's own elements travel.
    """
    nbytes = tensor.nbytes
    whole = tensor.untyped_storage().nbytes()
    return 0 < nbytes and whole <= max(_WHOLE_STORAGE_RATIO * nbytes, _SMALL_STORAGE_NBYTES)


def memory_of(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """Return a contiguous tensor of what has to travel of a plain one, and the strides to view it with, if any."""
    flat = tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_contiguous():
        return flat, tuple(tensor.stride()) if 1 in tensor.size() and not _lies_as_rows(tensor) else None
    stride = tuple(tensor.stride())
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.size(), stride, strict=True))
    if span <= tensor.numel():  # permuted or expanded: the memory as it lies
        return flat.as_strided((span,), (1,)), stride
    return flat.contiguous(), None


def _lies_as_rows(tensor: torch.Tensor) -> bool:
    """Return whether a contiguous tensor has the usual strides also where a length is one, which allows any."""
    step = 1
    for length, stride in zip(reversed(tensor.size()), reversed(tensor.stride()), strict=True):
        if stride != step:
            return False
        step *= length
    return True


def shaped(
    flat: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...] | None, requires_grad: bool
) -> torch.Tensor:
    """Return the tensor of which `memory_of` gave `flat` and `stride`."""
    if len(size) != 1 or stride is not None:
        flat = flat.view(size) if stride is None else flat.as_strided(size, stride)
    return flat.requires_grad_() if requires_grad else flat


def empty(dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """Return a tensor without elements."""
    return torch.empty_strided(size, stride, dtype=dtype, requires_grad=requires_grad)
