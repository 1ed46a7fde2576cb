"""A sample as one run of bytes that owns nothing outside of it, and back as objects of their own.

    u8 kind (0 a pickle, 1 the description of a plain tree) | u32 buffers | u32 bytes of the skeleton
    u64 length of each buffer | the skeleton, pickled | each buffer, at a multiple of 16

What is decoded shares memory with nothing: a program may write to its samples.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from penstock.core import plain_tree
from penstock.core.errors import UnpicklableError
from penstock.core.units import round_up

_HEAD = struct.Struct("<BII")
_ALIGNMENT = 16


def encode(sample: Any, index: object) -> bytes:
    """Return the bytes of sample `index`.

    >>> decode(np.frombuffer(bytearray(encode({"x": torch.arange(3), "y": np.ones(2)}, 0)), np.uint8))
    {'x': tensor([0, 1, 2]), 'y': array([1., 1.])}
    """
    return b"".join(encode_parts(sample, index))


def encode_parts(sample: Any, index: object) -> list[bytes | memoryview]:
    """Return what `encode` joins: the sample's own memory, not copied."""
    if (plain := plain_tree.describe(sample)) is not None:
        node, tensors = plain
        return _parts(1, pickle.dumps(node, 5), [tensor.view(-1).view(torch.uint8).numpy().data for tensor in tensors])
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, 5, buffer_callback=buffers.append).dump(sample)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UnpicklableError(
            f"sample {index} ({type(sample).__qualname__}) cannot be cached: {error}; return tensors, arrays, numbers, "
            "strings and picklable objects, or cache a dataset before the step that makes the others"
        ) from error
    return _parts(0, stream.getvalue(), [buffer.raw() for buffer in buffers])


def decode(content: np.ndarray) -> Any:
    """Return the sample whose bytes these are (uint8, writable)."""
    kind, count, length = _HEAD.unpack_from(content.data)
    lengths = struct.unpack_from(f"<{count}Q", content.data, _HEAD.size)
    at = _HEAD.size + 8 * count
    skeleton = content[at : at + length].data
    views = [content[start:stop] for start, stop in _places(at + length, lengths)]
    if kind == 0:
        return pickle.loads(skeleton, buffers=[view.copy() for view in views])
    return plain_tree.rebuild(pickle.loads(skeleton), lambda number, dtype, _: _tensor(views[number], dtype))


def _tensor(view: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(view, dtype=dtype).clone()


def _parts(kind: int, skeleton: bytes, buffers: list[memoryview]) -> list[bytes | memoryview]:
    lengths = [buffer.nbytes for buffer in buffers]
    parts: list[bytes | memoryview] = [
        _HEAD.pack(kind, len(buffers), len(skeleton)),
        struct.pack(f"<{len(lengths)}Q", *lengths),
    ]
    parts.append(skeleton)
    end = sum(map(len, parts))
    for buffer, (start, stop) in zip(buffers, _places(end, lengths), strict=True):
        parts += [bytes(start - end), buffer] if start > end else [buffer]
        end = stop
    return parts


def _places(end: int, lengths: Any) -> Iterator[tuple[int, int]]:
    for length in lengths:
        start = round_up(end, _ALIGNMENT)
        end = start + length
        yield start, end


class _Pickler(pickle.Pickler):
    """Pickle with the bytes of plain tensors beside it, as NumPy's arrays are."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or not plain_tree.is_plain(obj) or obj.numel() == 0:
            return NotImplemented
        flat, stride = plain_tree.memory_of(obj)
        buffer = pickle.PickleBuffer(flat.view(-1).view(torch.uint8).numpy().data)
        return _rebuild, (buffer, obj.dtype, tuple(obj.size()), stride, obj.requires_grad)


def _rebuild(
    buffer: np.ndarray, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...] | None, requires_grad: bool
) -> torch.Tensor:
    return plain_tree.shaped(_tensor(buffer, dtype), size, stride, requires_grad)
