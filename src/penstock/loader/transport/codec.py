"""Any picklable object as a small envelope, with the bytes of its tensors and arrays beside it in a slot.

A plain tree of tensors (see `plain_tree`) is described; all else is pickled, protocol 5 with out-of-band buffers (PEP
574). NumPy arrays go out of band by themselves; tensors do not, so the encoder has its own reducer for them. A buffer
that already lies in the slot (collate put it there) is only referred to; the others are copied in behind it. Views of
one storage stay views of one (see `plain_tree.takes_storage_along`). When all
of them are small, they stay in the envelope (inline), and the batch needs no slot.

Envelope format, little endian:

    u64 bytes of all buffers | u32 number of buffers | u8 flags: 1 when the buffers follow the skeleton (else they lie
    in the slot), 2 when the skeleton is a plain tree's (else it is a pickle with buffers)
    per buffer: u64 offset, u64 length
    u32 length of the skeleton | the skeleton, pickled | (inline buffers, each at its offset from here)

Decoded tensors and arrays are views. In the slot they keep the slot's lease alive; inline ones keep the message alive.
"""

from __future__ import annotations

import copyreg
import ctypes
import io
import pickle
import struct
from collections import ChainMap
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_storage, reduce_tensor

from penstock.core import plain_tree
from penstock.core.errors import UnpicklableError
from penstock.core.units import round_up
from penstock.loader.transport.arena import ALIGNMENT, Arena, ArenaFullError

INLINE_NBYTES = 16_384
"""Buffers of at most this many bytes together stay in the envelope: below it, a slot costs more than a copy."""

_SMALL_NBYTES = 4096
"""A buffer of at most so many bytes stays in the pickle."""

_HEAD = struct.Struct("<QIB")
_INLINE, _TREE = 1, 2
_SPAN = struct.Struct("<QQ")
_LENGTH = struct.Struct("<I")


Carry = Callable[[Any], tuple[Any, ...] | None]
"""Returns how to pickle a class or a function, as `__reduce__` does; None to pickle it by its name."""


def encode(obj: Any, arena: Arena | None, carry: Carry | None = None, *, shares: bool = False) -> bytes:
    """Return the envelope of `obj`, whose large buffers are or will be in `arena`; without an arena, all are inline.

    With `shares`, tensors in shared memory arrive as the same memory, as with torch: their descriptors are handed over,
    for which this process has to live until the envelope is decoded.

    Raises:
        ArenaFullError: the buffers need more than the slot has.
        UnpicklableError: `obj` holds something that pickle refuses.
        RuntimeError: `obj` holds a tensor that was computed from one that requires grad (torch's error).
    """
    if (plain := plain_tree.describe(obj, shares=shares)) is not None:
        node, tensors = plain
        return pack(pickle.dumps(node, 5), tensors, arena, is_tree=True)
    try:
        skeleton, arrays = flatten(obj, carry=carry, shares=shares)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UnpicklableError(
            f"a batch of type {type(obj).__qualname__} cannot travel from its worker: {error}; "
            "return tensors, arrays, numbers, strings and picklable objects, or use num_workers=0"
        ) from error
    return pack(skeleton, arrays, arena)


def flatten(obj: Any, carry: Carry | None = None, *, shares: bool = False) -> tuple[bytes, list[np.ndarray]]:
    """Return the pickle of `obj` and the bytes (uint8) it refers to."""
    pieces: list[np.ndarray] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        """Leave a small buffer in the pickle, where it takes less than a place of its own does."""
        piece = np.frombuffer(buffer.raw(), np.uint8)
        if piece.nbytes <= _SMALL_NBYTES:
            return True
        pieces.append(piece)
        return False

    stream = io.BytesIO()
    _Pickler(stream, is_small, carry, shares=shares).dump(obj)
    return stream.getvalue(), pieces


def pack(
    skeleton: bytes, pieces: Sequence[np.ndarray | torch.Tensor], arena: Arena | None, *, is_tree: bool = False
) -> bytes:
    """Return the envelope of a skeleton and the pieces of memory (contiguous) it refers to; see `encode`."""
    total = sum(piece.nbytes for piece in pieces)
    inline = arena is None or (arena.used == 0 and total <= INLINE_NBYTES)
    tail: list[bytes] = []
    if arena is None or inline:
        offsets, tail = _line_up(pieces)
    else:
        offsets = [_place(piece, arena, total + ALIGNMENT * len(pieces)) for piece in pieces]
    spans = [_SPAN.pack(offset, piece.nbytes) for offset, piece in zip(offsets, pieces, strict=True)]
    head = _HEAD.pack(total, len(pieces), _INLINE * inline + _TREE * is_tree)
    return b"".join((head, *spans, _LENGTH.pack(len(skeleton)), skeleton, *tail))


def _line_up(pieces: Sequence[np.ndarray | torch.Tensor]) -> tuple[list[int], list[bytes]]:
    """Return the offset of each piece in the envelope's tail, and the tail."""
    spans: list[int] = []
    tail: list[bytes] = []
    end = 0
    for piece in pieces:
        offset = round_up(end, 16)
        spans.append(offset)
        if offset > end:
            tail.append(bytes(offset - end))
        tail.append(ctypes.string_at(_address_of(piece), piece.nbytes))
        end = offset + piece.nbytes
    return spans, tail


def _address_of(piece: np.ndarray | torch.Tensor) -> int:
    return int(piece.__array_interface__["data"][0] if isinstance(piece, np.ndarray) else piece.data_ptr())


def _place(piece: np.ndarray | torch.Tensor, arena: Arena, needed_for_all: int) -> int:
    """Return where in `arena` the bytes of `piece` are, after copying them there if they were not."""
    if piece.nbytes == 0:
        return 0
    offset = arena.offset_of(_address_of(piece), piece.nbytes)
    if offset is None:
        try:
            offset = arena.take(piece.nbytes)
        except ArenaFullError:
            raise ArenaFullError(needed_for_all) from None
        ctypes.memmove(arena.address + offset, _address_of(piece), piece.nbytes)
    return offset


def is_inline(envelope: bytes | memoryview) -> bool:
    """Return whether the envelope needs no slot."""
    return bool(envelope[_HEAD.size - 1] & _INLINE)


def nbytes_of(envelope: bytes | memoryview) -> int:
    """Return how many bytes of tensors and arrays the envelope's object has."""
    return int(_HEAD.unpack_from(envelope)[0])


def decode(envelope: bytes | memoryview, memory: np.ndarray | None) -> Any:
    """Rebuild the object of `envelope`; `memory` is its slot (uint8), None when the envelope is inline."""
    spans, skeleton, end = _parse(envelope)
    if is_inline(envelope):
        memory = inline_memory(envelope, end) if spans else None
    if _is_tree(envelope):
        return plain_tree.rebuild(
            pickle.loads(skeleton),
            lambda number, dtype, elements: torch.frombuffer(
                memory, dtype=dtype, count=elements, offset=spans[number][0]
            ),
        )
    buffers = [] if memory is None else [memory[offset : offset + nbytes] for offset, nbytes in spans]
    return pickle.loads(skeleton, buffers=buffers)


def _parse(envelope: bytes | memoryview) -> tuple[list[tuple[int, int]], memoryview, int]:
    """Return the offset and length of each buffer, the skeleton, and where what follows it begins."""
    _, count, _ = _HEAD.unpack_from(envelope)
    at = _HEAD.size
    spans: list[Any] = [_SPAN.unpack_from(envelope, at + i * _SPAN.size) for i in range(count)]
    at += count * _SPAN.size
    (length,) = _LENGTH.unpack_from(envelope, at)
    at += _LENGTH.size
    return spans, memoryview(envelope)[at : at + length], at + length


def inline_memory(envelope: bytes | memoryview, start: int) -> np.ndarray:
    """Return a copy (uint8) of the buffers in an envelope: writable, and aligned as their offsets are."""
    return np.frombuffer(bytearray(memoryview(envelope)[start:]), np.uint8)


def _is_tree(envelope: bytes | memoryview) -> bool:
    return bool(envelope[_HEAD.size - 1] & _TREE)


def description_nbytes(envelope: bytes) -> int:
    """Return how many bytes describe the batch of an envelope, before its buffers; 0 unless it is a plain tree."""
    if not _is_tree(envelope):
        return 0
    if not is_inline(envelope):
        return len(envelope)
    at = _HEAD.size + _SPAN.size * int(_HEAD.unpack_from(envelope)[1])
    return at + _LENGTH.size + int(_LENGTH.unpack_from(envelope, at)[0])


def describe(envelope: bytes) -> tuple[list[int], Any]:
    """Return the offset of each tensor of a plain tree, and its description; see `plain_tree.compiled`."""
    spans, skeleton, _ = _parse(envelope)
    return [offset for offset, _ in spans], pickle.loads(skeleton)


class _Pickler(ForkingPickler):
    """Pickle with our reducers for host tensors and storages; device memory keeps torch's own (CUDA IPC)."""

    def __init__(
        self,
        stream: io.BytesIO,
        buffer_callback: Callable[[pickle.PickleBuffer], bool],
        carry: Carry | None,
        *,
        shares: bool,
    ) -> None:
        pickle.Pickler.__init__(self, stream, protocol=5, buffer_callback=buffer_callback)
        self.dispatch_table = _REDUCERS
        self._carry = carry
        self._shares = shares
        self._storages: dict[int, torch.UntypedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.ndarray:
            if obj.nbytes <= _SMALL_NBYTES and obj.dtype.isnative:
                return obj.__reduce__()
            # One that cannot be written to would arrive as a view that refuses it, too.
            return NotImplemented if obj.flags.writeable else obj.copy(order="K").__reduce_ex__(5)
        if isinstance(obj, torch.Tensor):
            if obj.requires_grad and not obj.is_leaf:
                return reduce_tensor(obj)  # which is torch's refusal: its gradient would end here, unnoticed
            if type(obj) is torch.Tensor and plain_tree.is_plain(obj):
                return self._reduce_view(obj) or _reduce_plain(obj)
            return obj.__reduce_ex__(5) if obj.device.type == "cpu" else NotImplemented
        if self._shares and isinstance(obj, torch.TypedStorage | torch.UntypedStorage) and obj.is_shared():
            return reduce_storage(obj) if isinstance(obj, torch.UntypedStorage) else NotImplemented
        if isinstance(obj, torch.TypedStorage):
            return _reduce_storage(obj._untyped_storage, obj.dtype)
        if isinstance(obj, torch.UntypedStorage):
            return _reduce_storage(obj, None)
        if self._carry is not None and isinstance(obj, type | FunctionType) and (how := self._carry(obj)) is not None:
            return how
        return NotImplemented

    def _reduce_view(self, tensor: torch.Tensor) -> Any:
        """Return how to pickle a tensor as a view of its storage, which all its views then share, as with torch."""
        storage = tensor.untyped_storage()
        takes_along = plain_tree.takes_storage_along(tensor) or (self._shares and storage.is_shared())
        if storage._cdata not in self._storages and not takes_along:
            return None
        storage = self._storages.setdefault(storage._cdata, storage)  # one object, so that pickle knows it again
        place = tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride())
        return _rebuild_view, (storage, tensor.dtype, *place, tensor.requires_grad)


_REDUCERS: Any = ChainMap(ForkingPickler._extra_reducers, copyreg.dispatch_table)  # type: ignore[attr-defined]
"""Of multiprocessing and of pickle, as they are at any time."""


def _reduce_plain(tensor: torch.Tensor) -> Any:
    """Return how to pickle a tensor without its storage."""
    if tensor.numel() == 0:
        return plain_tree.empty, (tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), tensor.requires_grad)
    flat, stride = plain_tree.memory_of(tensor)
    buffer = pickle.PickleBuffer(flat.view(-1).view(torch.uint8).numpy().data)
    return _rebuild, (buffer, tensor.dtype, tuple(tensor.size()), stride, tensor.requires_grad)


def _rebuild(
    buffer: Any, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...] | None, requires_grad: bool
) -> torch.Tensor:
    return plain_tree.shaped(torch.frombuffer(buffer, dtype=dtype), size, stride, requires_grad)


def _rebuild_view(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride).requires_grad_(requires_grad)


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
