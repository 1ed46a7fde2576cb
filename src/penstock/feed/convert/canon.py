"""What a sample is, as bytes: the same for equal samples of any two formats. A checksum of a data set is made of them.

    sample   fields by name, each: name, kind, dtype, shape, and the bytes of the value
    value    little-endian, C order; every NaN is the quiet one, since text formats keep no others
    sum      SHA-256 of each sample, added up modulo 2^256: samples may be dealt out in any way and any order

A sum says that the same samples are there as often as before; their order it does not say.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.feed.sources.sample import field_of, plain

_MODULUS = 1 << 256


def encoded(sample: Mapping[str, Any]) -> list[bytes | memoryview]:
    """Return the pieces of bytes that stand for a sample.

    Raises:
        SourceError: a field holds something that no field may hold.

    >>> one = b"".join(encoded({"x": np.arange(3, dtype=">i2"), "y": 1.5}))
    >>> other = b"".join(encoded({"y": 1.5, "x": np.arange(3, dtype="<i2")}))
    >>> one == other
    True
    """
    pieces: list[bytes | memoryview] = []
    for name in sorted(sample):
        value = plain(sample[name])
        data: bytes | memoryview
        if isinstance(value, np.ndarray | np.generic):
            array = _settled(np.asarray(value))
            kind = "array" if isinstance(value, np.ndarray) else "number"
            head, data = f"{kind} {array.dtype.str} {array.shape}", array.reshape(-1).view(np.uint8).data
        elif isinstance(value, str):
            head, data = "text", value.encode("utf-8", "surrogatepass")
        else:
            head, data = "bytes", value
        words = f"{name}\0{head}".encode("utf-8", "surrogatepass")
        pieces += [struct.pack("<QQ", len(words), len(data)), words, data]
    return pieces


def _settled(array: np.ndarray) -> np.ndarray:
    """Return the array little-endian, in C order and with one kind of NaN."""
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    if array.dtype.kind == "c":
        flat = array.reshape(-1).view(array.real.dtype)
    elif array.dtype.kind == "f":
        flat = array.reshape(-1)
    else:
        return array
    missing = np.isnan(flat)
    if missing.any():
        flat = np.where(missing, flat.dtype.type(np.nan), flat)
        return flat.view(array.dtype).reshape(array.shape)
    return array


@dataclass(slots=True)
class Tally:
    """How many samples there were, their bytes, and their sum."""

    samples: int = 0
    nbytes: int = 0
    """Of their canonical encoding."""
    sum: int = 0

    def add(self, sample: Mapping[str, Any]) -> None:
        """Count a sample in."""
        digest = hashlib.sha256()
        for piece in encoded(sample):
            digest.update(piece)
            self.nbytes += len(piece)
        self.samples += 1
        self.sum = (self.sum + int.from_bytes(digest.digest(), "big")) % _MODULUS

    def add_tally(self, other: Tally) -> None:
        """Count in what another one has counted."""
        self.samples += other.samples
        self.nbytes += other.nbytes
        self.sum = (self.sum + other.sum) % _MODULUS

    def checksum(self) -> str:
        """Return the sum as text.

        >>> tally = Tally()
        >>> tally.add({"x": 1})
        >>> tally.checksum()[:15]
        'sum-sha256:6398'
        """
        return f"sum-sha256:{self.sum:064x}"


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Say in which field two samples differ; "" where they are equal.

    >>> difference({"x": 1}, {"x": 1}), difference({"x": np.zeros(2)}, {"x": np.zeros(3)})
    ('', "field 'x' is float64[2] and float64[3]")
    """
    if one.keys() != other.keys():
        return f"one has the fields {sorted(one)}, the other {sorted(other)}"
    for name in sorted(one):
        was, found = field_of(one[name]), field_of(other[name])
        if was != found:
            return f"field {name!r} is {was.words()} and {found.words()}"
        if b"".join(encoded({name: one[name]})) != b"".join(encoded({name: other[name]})):
            return f"field {name!r} has other values"
    return ""
