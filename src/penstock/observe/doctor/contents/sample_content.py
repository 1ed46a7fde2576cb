"""What a sample holds, as bytes: two samples are the same if all their tensors, arrays, images, text and numbers are.

Nothing is known of a sample with any other object in it. Not every repetition means something: blank images, padded
lines of a few tokens and rows of a few categories are equal by chance. So content counts only if it has many bytes
even after it was compressed; fewer where it has fractions, which are measured and not chosen.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_BLOCK = 1 << 14
_BLANK = 64
"""Times smaller when compressed: zlib makes some 200 bytes of one out of equal ones, whatever their number."""

_FLOATS = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}

_Bytes = bytes | memoryview


class SampleContent:
    """The content of one sample.

    Args:
        shape: names, types and shapes of its values.
        values: their bytes.
        floats: those of them that are floating-point numbers, as arrays.
    """

    __slots__ = ("_floats", "_values", "digest", "nbytes")

    def __init__(self, shape: str, values: list[_Bytes], floats: list[np.ndarray]) -> None:
        hashed = hashlib.blake2b(shape.encode("utf-8", "surrogatepass"), digest_size=16)
        for value in values:
            hashed.update(value)
        self._values = values
        self._floats = floats
        self.digest = hashed.digest()
        self.nbytes = sum(memoryview(value).nbytes for value in values)

    def information(self, most: int) -> int:
        """Return how many bytes the content has when compressed, or `most` of them; 0 where it is nearly blank."""
        least = self.nbytes // _BLANK
        packer, size = zlib.compressobj(1), 0
        for block in self._blocks():
            size += len(packer.compress(block))
            if size >= max(most, least):
                return most
        size += len(packer.flush())
        return min(size, most) if size >= least else 0

    @property
    def has_fractions(self) -> bool:
        """Whether some of its numbers are not whole."""
        with np.errstate(invalid="ignore"):  # of values that are not finite
            return any(bool((values % 1 > 0).any()) for values in self._floats)

    def _blocks(self) -> Iterator[memoryview]:
        for value in self._values:
            view = memoryview(value).cast("B")
            for start in range(0, len(view), _BLOCK):
                yield view[start : start + _BLOCK]


def content_of(sample: Any, index: object = None) -> SampleContent | None:
    """Return the content of a sample; None where it has an object of unknown content.

    An integer that is the sample's own index does not count: without it, no two samples could be equal.

    >>> one, other = (content_of({"x": torch.arange(4), "id": number}, number) for number in (3, 7))
    >>> one.digest == other.digest, one.information(64) < 64
    (True, True)
    >>> content_of([0.5, 1.0]).has_fractions, content_of(torch.ones(2)).has_fractions
    (True, False)
    """
    leaves, spec = torch.utils._pytree.tree_flatten(sample)
    shapes, values, floats = [str(spec)], [], []
    for leaf in leaves:
        read = ("own index", b"") if type(leaf) is int and leaf == index else _read(leaf)
        if read is None:
            return None
        shapes.append(read[0])
        values.append(read[1])
        if isinstance(leaf, float | np.floating | np.ndarray) and np.asarray(leaf).dtype.kind == "f":
            floats.append(np.asarray(leaf))
        elif isinstance(leaf, torch.Tensor) and leaf.dtype in _FLOATS and read[1]:
            floats.append(np.frombuffer(read[1], _FLOATS[leaf.dtype]))
    return SampleContent("\n".join(shapes), values, floats)


def _read(leaf: Any) -> tuple[str, _Bytes] | None:
    """Return the type and shape of a leaf, and its bytes."""
    if isinstance(leaf, torch.Tensor):
        return _read_tensor(leaf)
    if isinstance(leaf, np.ndarray):
        if leaf.dtype.hasobject:
            return None
        data = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data if leaf.size else b""
        return f"{leaf.dtype.str}{leaf.shape}", data
    if leaf is None or isinstance(leaf, bool | int | float | complex | np.generic):
        text = repr(leaf).encode()
        return f"{type(leaf).__name__}{len(text)}", text
    if isinstance(leaf, str):
        text = leaf.encode("utf-8", "surrogatepass")
        return f"str{len(text)}", text
    if isinstance(leaf, bytes | bytearray):
        return f"bytes{len(leaf)}", bytes(leaf)
    if _is_image(leaf):
        return f"{leaf.mode}{leaf.size}", leaf.tobytes()
    return None


def _read_tensor(tensor: torch.Tensor) -> tuple[str, _Bytes] | None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        return None
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = plain.view(torch.uint8).numpy().data if plain.numel() else b""
    return f"{tensor.dtype}{tuple(tensor.shape)}", data


def _is_image(leaf: Any) -> bool:
    return any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(leaf).__mro__)
