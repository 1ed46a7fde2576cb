"""Digests of indices: whether a sampler gives the same ones again, and where the orders of two runs part.

A digest is a number of 64 bits, a polynomial in the words that the indices consist of:

    digest of x[0], ..., x[n-1]   sum of (x[i] + 1) * BASE ** (n - 1 - i), modulo 2 ** 64

    a whole number of 64 bits     itself
    text                          its bytes, and 0
    a tuple of whole numbers      how many they are, and these
    anything else                 a hash of its text (BLAKE2b)

It depends on the indices and their order; not on how they are cut into batches, on the process or on the machine. It
tells accidents apart, not forgeries. Hashing each index of text or numbers by itself would cost more than a sample.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import operator
import struct
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_NUMBER = struct.Struct("<q")

_BASE = 6364136223846793005
"""Of Knuth's MMIX generator. Odd, so that no index is multiplied away."""

_NO_NUMBERS = TypeError, OverflowError, ValueError
"""What `array` raises for what is no whole number of 64 bits."""

_AT_ONCE = 4096
_MODULUS = 1 << 64


def _powers() -> tuple[np.ndarray, list[int]]:
    """Return the powers of the base, the highest first, and the sum of the lowest n of them, for each n."""
    powers = list(itertools.accumulate(range(_AT_ONCE - 1), lambda power, _: power * _BASE % _MODULUS, initial=1))
    return np.array(powers[::-1], np.uint64).view(np.int64), [0, *itertools.accumulate(powers)]


_POWERS, _SUMS = _powers()


def digest_after(digest: int | None, indices: Any) -> int | None:
    """Return the digest of what `digest` stands for and then `indices`; None where it cannot be told.

    Indices are numbers and text, and lists and tuples of these; of any other object, nobody can tell whether it is the
    same one. An array or tensor of whole numbers takes a nanosecond for each, a list twenty.

    >>> digest_after(digest_after(0, [1, "a"]), [(2, 3)]) == digest_after(0, [1, "a", (2, 3)])
    True
    """
    words = None if digest is None else index_words(indices)
    if digest is None or words is None:
        return None
    for start in range(0, len(words), _AT_ONCE):
        part = words[start : start + _AT_ONCE]
        count = len(part)
        added = int(np.dot(part, _POWERS[-count:])) + _SUMS[count]
        digest = (digest * pow(_BASE, count, _MODULUS) + added) % _MODULUS
    return digest


def index_words(indices: Any) -> np.ndarray | None:
    """Return what stands for indices in a digest, int64[words]; None where it cannot be told.

    >>> index_words(range(3)).tolist(), index_words(["A", "B"]).tolist(), index_words([(7, 8)]).tolist()
    ([0, 1, 2], [65, 0, 66, 0], [2, 7, 8])
    """
    if isinstance(indices, torch.Tensor):
        indices = indices.numpy()
    if isinstance(indices, np.ndarray) and indices.ndim == 0:
        indices = indices[None]  # without automatic batching, an index by itself
    if isinstance(indices, np.ndarray) and indices.dtype.kind == "i" and indices.ndim == 1:
        return indices.astype(np.int64, copy=False)
    if not isinstance(indices, Sequence | np.ndarray):
        return None
    with contextlib.suppress(*_NO_NUMBERS):
        return np.frombuffer(array("q", indices), np.int64)
    kinds, lengths = set(map(type, indices)), set[int]()
    if kinds == {str}:
        return np.frombuffer(_encoded("\0".join([*indices, ""])), np.uint8).astype(np.int64)
    if kinds == {tuple} and len(lengths := set(map(len, indices))) == 1 and lengths != {0}:
        (length,) = lengths
        with contextlib.suppress(*_NO_NUMBERS):
            numbers = np.frombuffer(array("q", itertools.chain.from_iterable(indices)), np.int64)
            return np.insert(numbers.reshape(-1, length), 0, length, axis=1).ravel()
    words = [_words_of(index) for index in indices]
    return None if None in words else np.array([*itertools.chain.from_iterable(words)], np.int64)  # type: ignore[arg-type]


def noted_indices(batch: Any) -> Any:
    """Return the indices of a batch, or an index by itself, for a digest: as they are now, whatever becomes of `batch`.

    A list of whole numbers, text or tuples of these is copied, which takes a tenth of a microsecond; of other indices
    those that may change become the words that stand for them in a digest, or None where it cannot be told.

    >>> noted_indices([1, 2]), noted_indices(3), noted_indices([("a", 3), ["b"]])[0]
    ([1, 2], [3], ('a', 3))
    """
    if type(batch) is list and batch:
        kind = type(batch[0])
        if (kind is int and kind is type(batch[-1])) or (_stays(batch[0]) and _stays(batch[-1])):
            return batch.copy()
    if isinstance(batch, torch.Tensor | np.ndarray):
        words = index_words(batch)
        return None if words is None else words.copy()
    noted = [
        index if _stays(index) else _word_of(index) for index in (batch if isinstance(batch, list | tuple) else [batch])
    ]
    return None if None in noted else noted


def _stays(index: Any) -> bool:
    """Return whether an index cannot change: a whole number, text, or a tuple of these."""
    kind = type(index)
    return kind is int or kind is str or (kind is tuple and all(type(part) in (int, str) for part in index))


def joined(batches: Sequence[Any]) -> Any:
    """Return the indices of several batches, each an array, a tensor or a list, as one of these."""
    if len(batches) == 1:
        return batches[0]
    kinds = set(map(type, batches))
    if kinds == {torch.Tensor}:
        return torch.cat(tuple(batches))
    if kinds == {np.ndarray}:
        return np.concatenate(batches)
    return list(itertools.chain.from_iterable(map(_as_list, batches)))


def _as_list(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor | np.ndarray) else batch


def _words_of(index: Any) -> Sequence[int] | None:
    if type(index) is str:
        return [*_encoded(index), 0]
    if type(index) is tuple and index:
        with contextlib.suppress(*_NO_NUMBERS):
            return [len(index), *array("q", index)]
    word = _word_of(index)
    return None if word is None else [word]


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _word_of(index: Any) -> int | None:
    try:
        return int(_NUMBER.unpack(_NUMBER.pack(operator.index(index)))[0])
    except (TypeError, ValueError, struct.error):
        data = bytes_of(index)
        return None if data is None else int(_NUMBER.unpack(hashlib.blake2b(data, digest_size=8).digest())[0])


def bytes_of(value: Any) -> bytes | None:
    """Return bytes that stand for numbers, text, arrays, and lists, tuples and dicts of these; None for others."""
    if value is None or type(value) in (str, bytes, float, bool):
        return repr(value).encode()
    if isinstance(value, torch.Tensor | np.ndarray):
        data = np.asarray(value)
        return None if data.dtype.hasobject else f"{data.dtype} {data.shape} ".encode() + data.tobytes()
    if type(value) is dict:
        value = [*value.items()]
    if type(value) in (list, tuple):
        parts = [bytes_of(part) for part in value]
        return None if None in parts else b"(%b)" % b",".join(part for part in parts if part is not None)
    try:
        return repr(operator.index(value)).encode()
    except TypeError:
        return None
