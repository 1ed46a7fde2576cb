"""Any picklable object as a small envelope, with the bytes of its tensors and arrays beside it in a slot.

It is pickle protocol 5 with out-of-band buffers (PEP 574). NumPy arrays go out of band by themselves; tensors do
not, so the encoder has its own reducer for them. A buffer that already lies in the slot (collate put it there) is
only referred to; the others are copied in behind it. When all of them are small, they stay in the envelope (inline),
and the batch needs no slot.

Envelope format, little endian:

    u32 number of buffers | u8 1 when the buffers follow the pickle, 0 when they lie in the slot
    per buffer: u64 offset, u64 length
    u32 length of the pickle | the pickle | (inline buffers, each at its offset from here)

Decoded tensors and arrays are views. In the slot they keep the slot's lease alive; inline ones keep the message alive.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

import numpy as np
import torch

from penstock.core.errors import UnpicklableError
from penstock.core.units import round_up
from penstock.loader.transport.arena import ALIGNMENT, Arena, ArenaFullError

INLINE_NBYTES = 16_384
"""Buffers of at most this many bytes together stay in the envelope: below it, a slot costs more than a copy."""

_HEAD = struct.Struct("<IB")
_SPAN = struct.Struct("<QQ")
_LENGTH = struct.Struct("<I")


Carry = Callable[[Any], tuple[Any, ...] | None]
"""Returns how to pickle a class or a function, as `__reduce__` does; None to pickle it by its name."""


def encode(obj: Any, arena: Arena | None, carry: Carry = lambda _: None) -> bytes:
    """Return the envelope of `obj`, whose large buffers are or will be in `arena`; without an arena, all are inline.

    Raises:
        ArenaFullError: the buffers need more than the slot has.
        UnpicklableError: `obj` holds something that pickle refuses.
    """
    try:
        skeleton, arrays = flatten(obj, carry=carry)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UnpicklableError(
            f"a batch of type {type(obj).__qualname__} cannot travel from its worker: {error}; "
            "return tensors, arrays, numbers, strings and picklable objects, or use num_workers=0"
        ) from error
    return pack(skeleton, arrays, arena)


def flatten(
    obj: Any, visit: Callable[[Any], None] = lambda _: None, carry: Carry = lambda _: None
) -> tuple[bytes, list[np.ndarray]]:
    """Return the pickle of `obj` and the bytes (uint8) it refers to; `visit` sees every object but plain builtins."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, buffers.append, visit, carry).dump(obj)
    return stream.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]


def pack(skeleton: bytes, arrays: list[np.ndarray], arena: Arena | None) -> bytes:
    """Return the envelope of what `flatten` gave; see `encode`."""
    total = sum(array.nbytes for array in arrays)
    inline = arena is None or (arena.used == 0 and total <= INLINE_NBYTES)
    tail: list[bytes | memoryview] = []
    if arena is None or inline:
        offsets, tail = _line_up(arrays)
    else:
        offsets = [_place(array, arena, total + ALIGNMENT * len(arrays)) for array in arrays]
    spans = (_SPAN.pack(offset, array.nbytes) for offset, array in zip(offsets, arrays, strict=True))
    head = _HEAD.pack(len(arrays), inline)
    return b"".join((head, *spans, _LENGTH.pack(len(skeleton)), skeleton, *tail))


def _line_up(arrays: list[np.ndarray]) -> tuple[list[int], list[bytes | memoryview]]:
    """Return the offset of each array in the envelope's tail, and the tail."""
    spans: list[int] = []
    tail: list[bytes | memoryview] = []
    end = 0
    for array in arrays:
        offset = round_up(end, 16)
        spans.append(offset)
        tail += (bytes(offset - end), array.data)
        end = offset + array.nbytes
    return spans, tail


def _place(array: np.ndarray, arena: Arena, needed_for_all: int) -> int:
    """Return where in `arena` the bytes of `array` are, after copying them there if they were not."""
    if array.nbytes == 0:
        return 0
    offset = arena.offset_of(array.ctypes.data, array.nbytes)
    if offset is None:
        try:
            offset = arena.take(array.nbytes)
        except ArenaFullError:
            raise ArenaFullError(needed_for_all) from None
        arena.memory[offset : offset + array.nbytes] = array
    return offset


def is_inline(envelope: bytes | memoryview) -> bool:
    """Return whether the envelope needs no slot."""
    return bool(envelope[4])


def decode(envelope: bytes | memoryview, memory: np.ndarray | None) -> Any:
    """Rebuild the object of `envelope`; `memory` is its slot (uint8), None when the envelope is inline."""
    count, inline = _HEAD.unpack_from(envelope)
    at = _HEAD.size
    spans = [_SPAN.unpack_from(envelope, at + i * _SPAN.size) for i in range(count)]
    at += count * _SPAN.size
    (length,) = _LENGTH.unpack_from(envelope, at)
    at += _LENGTH.size
    skeleton = memoryview(envelope)[at : at + length]
    if inline:
        # A copy, so that the tensors are writable and aligned.
        memory = np.frombuffer(bytearray(memoryview(envelope)[at + length :]), np.uint8) if count else None
    buffers = [] if memory is None else [memory[offset : offset + nbytes] for offset, nbytes in spans]
    return pickle.loads(skeleton, buffers=buffers)


def nbytes_of(envelope: bytes | memoryview) -> int:
    """Return how many bytes of tensors and arrays the envelope's object has."""
    (count, _) = _HEAD.unpack_from(envelope)
    return sum(_SPAN.unpack_from(envelope, _HEAD.size + i * _SPAN.size)[1] for i in range(count))


class _Pickler(ForkingPickler):
    """Pickle with our reducers for host tensors and storages; device memory keeps torch's own (CUDA IPC)."""

    def __init__(
        self,
        stream: io.BytesIO,
        buffer_callback: Callable[[pickle.PickleBuffer], None],
        visit: Callable[[Any], None],
        carry: Carry,
    ) -> None:
        pickle.Pickler.__init__(self, stream, protocol=5, buffer_callback=buffer_callback)
        self.dispatch_table = _dispatch_table()
        self._visit = visit
        self._carry = carry

    def reducer_override(self, obj: Any) -> Any:
        self._visit(obj)
        if isinstance(obj, torch.Tensor):
            if type(obj) is torch.Tensor and _is_plain(obj):
                return _reduce_plain(obj)
            return obj.__reduce_ex__(5) if obj.device.type == "cpu" else NotImplemented
        if isinstance(obj, torch.TypedStorage):
            return _reduce_storage(obj._untyped_storage, obj.dtype)
        if isinstance(obj, torch.UntypedStorage):
            return _reduce_storage(obj, None)
        if isinstance(obj, type | FunctionType) and (how := self._carry(obj)) is not None:
            return how
        return NotImplemented


def _dispatch_table() -> dict[type, Any]:
    return {**copyreg.dispatch_table, **ForkingPickler._extra_reducers}  # type: ignore[attr-defined]


def _is_plain(tensor: torch.Tensor) -> bool:
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


def _reduce_plain(tensor: torch.Tensor) -> Any:
    size = tuple(tensor.size())
    stride: tuple[int, ...] | None = tuple(tensor.stride())
    span = 1 + sum((n - 1) * step for n, step in zip(size, tensor.stride(), strict=True))
    flat = tensor.detach()
    if tensor.numel() == 0:
        return _empty, (tensor.dtype, size, tuple(tensor.stride()), tensor.requires_grad)
    if tensor.is_contiguous():
        stride = None
        flat = flat.view(-1)
    elif span <= tensor.numel():  # permuted or expanded: ship the memory as it lies, and the strides
        flat = flat.as_strided((span,), (1,))
    else:
        stride = None
        flat = flat.contiguous().view(-1)
    return _rebuild, (
        pickle.PickleBuffer(flat.view(torch.uint8).numpy().data),
        tensor.dtype,
        size,
        stride,
        tensor.requires_grad,
    )


def _empty(dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, requires_grad=requires_grad)


def _rebuild(
    buffer: Any, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...] | None, requires_grad: bool
) -> torch.Tensor:
    flat = torch.frombuffer(buffer, dtype=dtype)
    tensor = flat.view(size) if stride is None else flat.as_strided(size, stride)
    return tensor.requires_grad_() if requires_grad else tensor


def _reduce_storage(storage: torch.UntypedStorage, dtype: torch.dtype | None) -> Any:
    if storage.device.type != "cpu":
        return NotImplemented
    if storage.nbytes() == 0:
        return _rebuild_storage, (b"", dtype)
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    return _rebuild_storage, (pickle.PickleBuffer(whole.numpy().data), dtype)


def _rebuild_storage(buffer: Any, dtype: torch.dtype | None) -> torch.UntypedStorage | torch.TypedStorage:
    empty = len(buffer) == 0
    untyped = torch.UntypedStorage(0) if empty else torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    if dtype is None:
        return untyped
    return torch.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)
