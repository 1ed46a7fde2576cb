"""A canonical encoding of samples, equal for equal samples of any two formats, and the checksum of a data set.

    sample   fields by name, each: name, kind, dtype, shape, and the bytes of the value
    value    little-endian, C order; every NaN becomes the quiet one, since text formats keep no others
    sum      SHA-256 of each sample, added modulo 2^256: it is independent of order, and partial sums can be added
    order    the same, but what was added before is multiplied by a constant each time: it depends on the order

Equal sums mean that both data sets hold the same samples, each equally often, in whatever order.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.data.schema import plain

_MODULUS = 1 << 256
_FACTOR = 0x9E3779B97F4A7C15F39CC0605CEDC837  # odd, and half of one less is odd, too: no bit of a hash is lost


def encode_sample(sample: Mapping[str, Any]) -> list[bytes | memoryview]:
    """Return the canonical encoding of a sample, in parts.

    >>> one = b"".join(encode_sample({"x": np.arange(3, dtype=">i2"), "y": 1.5}))
    >>> other = b"".join(encode_sample({"y": 1.5, "x": np.arange(3, dtype="<i2")}))
    >>> one == other
    True
    """
    parts: list[bytes | memoryview] = []
    for name in sorted(sample):
        value = plain(sample[name])
        data: bytes | memoryview
        if isinstance(value, np.ndarray | np.generic):
            array = _normalize(np.asarray(value))
            kind = "array" if isinstance(value, np.ndarray) else "number"
            head, data = f"{kind} {array.dtype.str} {array.shape}", array.reshape(-1).view(np.uint8).data
        elif isinstance(value, str):
            head, data = "text", value.encode("utf-8", "surrogatepass")
        else:
            head, data = "bytes", value
        words = f"{name}\0{head}".encode("utf-8", "surrogatepass")
        parts += [struct.pack("<QQ", len(words), len(data)), words, data]
    return parts


def _normalize(array: np.ndarray) -> np.ndarray:
    """Return the array little-endian, in C order and with one kind of NaN."""
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    if array.dtype.kind not in "fc":
        return array
    flat = array.reshape(-1).view(array.real.dtype)
    missing = np.isnan(flat)
    if missing.any():
        return np.where(missing, flat.dtype.type(np.nan), flat).view(array.dtype).reshape(array.shape)
    return array


@dataclass(slots=True)
class DatasetChecksum:
    """The number of samples, the sum of their hashes, and one that depends on their order."""

    samples: int = 0
    sum: int = 0
    order: int = 0

    def add(self, sample: Mapping[str, Any]) -> int:
        """Add a sample, and return the bytes of its encoding."""
        digest, nbytes = hashlib.sha256(), 0
        for part in encode_sample(sample):
            digest.update(part)
            nbytes += len(part)
        self.samples += 1
        number = int.from_bytes(digest.digest(), "big")
        self.sum = (self.sum + number) % _MODULUS
        self.order = (self.order * _FACTOR + number) % _MODULUS
        return nbytes

    def unordered(self) -> tuple[int, int]:
        """Return what does not depend on the order."""
        return self.samples, self.sum

    @classmethod
    def total(cls, checksums: Sequence[DatasetChecksum]) -> DatasetChecksum:
        """Return the checksum of the samples of all, one after another."""
        total = cls()
        for one in checksums:
            total.samples += one.samples
            total.sum = (total.sum + one.sum) % _MODULUS
            total.order = (total.order * pow(_FACTOR, one.samples, _MODULUS) + one.order) % _MODULUS
        return total

    def to_text(self) -> str:
        """Return the sum as text.

        >>> checksum = DatasetChecksum()
        >>> _ = checksum.add({"x": 1})
        >>> checksum.to_text()[:15]
        'sum-sha256:6398'
        """
        return f"sum-sha256:{self.sum:064x}"
