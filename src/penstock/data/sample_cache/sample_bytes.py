"""A sample as one run of bytes that owns nothing outside of it, and back as objects of its own.

    i64 buffers | i64 bytes of the pickle | i64 bytes of each buffer | the pickle | each buffer, at a multiple of 64

Buffers are the memory of arrays and plain tensors. What is decoded shares memory with nothing that is not of the same
sample: a program may write to it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from penstock.core import plain_tree
from penstock.core.errors import UnpicklableError
from penstock.core.units import round_up

_ALIGNMENT = 64


def encode(sample: Any, index: object) -> bytes:
    """Return the bytes of sample `index`.

    >>> decode(np.frombuffer(bytearray(encode({"x": torch.arange(3), "y": np.ones(2)}, 0)), np.uint8))
    {'x': tensor([0, 1, 2]), 'y': array([1., 1.])}
    """
    return b"".join(encode_parts(sample, index))


def encode_parts(sample: Any, index: object) -> list[bytes | memoryview]:
    """Return what `encode` joins: the sample's own memory, not copied."""
    found: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, 5, buffer_callback=found.append).dump(sample)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UnpicklableError(
            f"sample {index} ({type(sample).__qualname__}) cannot be cached: {error}; return tensors, arrays, numbers, "
            "strings and picklable objects, or cache a dataset before the step that makes the others"
        ) from error
    buffers = [buffer.raw() for buffer in found]
    lengths = [buffer.nbytes for buffer in buffers]
    head = np.array([len(buffers), stream.tell(), *lengths], "<i8").tobytes()
    parts: list[bytes | memoryview] = [head, stream.getvalue()]
    end = len(head) + stream.tell()
    for buffer, (start, stop) in zip(buffers, _places(end, lengths), strict=True):
        parts += [bytes(start - end), buffer]
        end = stop
    return parts


def decode(content: np.ndarray) -> Any:
    """Return the sample whose bytes these are (uint8, writable, and from now on the sample's)."""
    count, length = content[:16].view("<i8").tolist()
    at = 16 + 8 * count
    views = [content[start:stop] for start, stop in _places(at + length, content[16:at].view("<i8").tolist())]
    # Who keeps a small part of a sample must not keep all of it.
    buffers = [view if 2 * view.nbytes > content.nbytes else view.copy() for view in views]
    return pickle.loads(content[at : at + length].data, buffers=buffers)


def _places(end: int, lengths: Iterable[int]) -> Iterator[tuple[int, int]]:
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
    return plain_tree.shaped(torch.frombuffer(buffer, dtype=dtype).clone(), size, stride, requires_grad)
