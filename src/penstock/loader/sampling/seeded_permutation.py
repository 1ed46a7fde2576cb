"""A random permutation computed by index: nothing is drawn or held, whatever its length.

    halves      of the bits that the largest number has, the upper and the lower
    round       one half is changed by a keyed hash of the other, by turns, so that each round can be undone: a Feistel
                network, which maps the numbers of so many bits onto each other
    walk        what falls beyond the length is mapped again, until it does not

Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002. The hash of a round is made for speed: this
permutation is random to statistics, and no cipher.
"""

from __future__ import annotations

import hashlib

import numpy as np

_ROUNDS = 8
"""With six, the orders of ten samples and fewer are not equally frequent."""

_FIRST, _SECOND = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)
"""Odd, and without a pattern in their bits: neighbouring numbers are spread out."""
_SHIFT = np.uint32(15)

_MOST_BITS = 62


class SeededPermutation:
    """The numbers below a length, in an order that a seed and an epoch make.

    Args:
        length: at most 2 ** 62.
        seed: any whole number.
        epoch: any whole number; the orders of two epochs have nothing to do with each other.

    >>> order = SeededPermutation(10, seed=0, epoch=0)
    >>> sorted(order.at(np.arange(10)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, length: int, *, seed: int, epoch: int) -> None:
        bits = max(2, (length - 1).bit_length())
        assert bits <= _MOST_BITS
        self._length = length
        self._lower = bits // 2
        self._upper = bits - self._lower
        key = hashlib.blake2b(f"{length}/{seed}/{epoch}".encode(), digest_size=4 * _ROUNDS).digest()
        self._keys = np.frombuffer(key, "<u4").astype(np.uint32)

    def __len__(self) -> int:
        return self._length

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at some places, int64[places] of int64[places]; each place is below the length."""
        found = self._mapped(places)
        while (beyond := np.flatnonzero(found >= self._length)).size:
            found[beyond] = self._mapped(found[beyond])
        return found

    def _mapped(self, numbers: np.ndarray) -> np.ndarray:
        """Return what the network maps numbers of its bits to."""
        upper = (numbers >> self._lower).astype(np.uint32)
        lower = (numbers & ((1 << self._lower) - 1)).astype(np.uint32)
        hashed, shifted = np.empty_like(upper), np.empty_like(upper)
        changed, other, bits, other_bits = upper, lower, self._upper, self._lower
        for key in self._keys:
            np.add(other, key, out=hashed)
            np.multiply(hashed, _FIRST, out=hashed)
            np.right_shift(hashed, _SHIFT, out=shifted)
            np.bitwise_xor(hashed, shifted, out=hashed)
            np.multiply(hashed, _SECOND, out=hashed)
            np.right_shift(hashed, np.uint32(32 - bits), out=hashed)
            np.bitwise_xor(changed, hashed, out=changed)
            changed, other, bits, other_bits = other, changed, other_bits, bits
        mapped: np.ndarray = upper.astype(np.int64)
        mapped <<= self._lower
        mapped |= lower
        return mapped
