"""PassDigest: a running hash of the indices that a loop was handed in one pass, kept at powers of two of batches.

It tells whether a sampler gives the same indices again, and where the orders of two runs part. The hash is a number of
64 bits, a polynomial in whole numbers of 64 bits:

    hash of x[0], ..., x[n-1]   sum of (x[i] + 1) * BASE ** (n - 1 - i), modulo 2 ** 64
    x[i]                        index i; of text, or a tuple of text and numbers, the CRC-32 of its repr

It depends on the indices and their order; not on how they are cut into batches, on the process or on the machine. It
tells accidents apart, not forgeries.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.core.stats import IndexDigest

_BASE = 6364136223846793005
"""Of Knuth's MMIX generator. Odd, so that no index is multiplied away."""

_AT_ONCE = 4096
_MODULUS = 1 << 64

_BATCHES_AT_ONCE = 64
_INDICES_AT_ONCE = 1 << 15
"""What a loop was handed is hashed rarely: the call costs more than the indices, and cools the step's caches."""

_SHORT = 1024
"""Indices that may wait to be hashed after a pass, until somebody asks: there may be a thousand passes a second."""

_MOST_MARKS = 128

UNKNOWN = "the sampler gives objects that cannot be compared"


def _powers() -> tuple[np.ndarray, list[int]]:
    """Return the powers of the base, the highest first, and the sum of the lowest n of them, for each n."""
    powers = list(itertools.accumulate(range(_AT_ONCE - 1), lambda power, _: power * _BASE % _MODULUS, initial=1))
    return np.array(powers[::-1], np.uint64).view(np.int64), [0, *itertools.accumulate(powers)]


_POWERS, _SUMS = _powers()


def digest_after(digest: int, words: np.ndarray) -> int:
    """Return the hash of what `digest` stands for and then `words`, int64[indices], a nanosecond for each.

    >>> digest_after(digest_after(0, np.arange(2)), np.arange(2, 5)) == digest_after(0, np.arange(5))
    True
    """
    for start in range(0, len(words), _AT_ONCE):
        part = words[start : start + _AT_ONCE]
        count = len(part)
        added = int(np.dot(part, _POWERS[-count:])) + _SUMS[count]
        digest = (digest * pow(_BASE, count, _MODULUS) + added) % _MODULUS
    return digest


def index_words(batch: Any) -> np.ndarray | None:
    """Return what the indices of a batch, or an index by itself, are in the hash, int64[indices]; None for objects.

    >>> index_words([3, 5]).tolist(), index_words(7).tolist(), index_words([object()])
    ([3, 5], [7], None)
    """
    if isinstance(batch, torch.Tensor):
        batch = batch.numpy()
    if isinstance(batch, np.ndarray) and batch.dtype.kind == "i" and batch.ndim == 1:
        return batch.astype(np.int64, copy=False)
    is_one = not isinstance(batch, list | np.ndarray) or (isinstance(batch, np.ndarray) and not batch.ndim)
    indices: Any = [batch] if is_one else batch
    try:
        return np.frombuffer(array("q", indices), np.int64)
    except (TypeError, OverflowError, ValueError):  # of no whole numbers, or of more than 64 bits
        words = [_word_of(index) for index in indices]
        return None if None in words else np.array(words, np.int64)


def _word_of(index: Any) -> int | None:
    if isinstance(index, int) and abs(index) < 1 << 63:
        return index
    parts = index if type(index) is tuple else (index,)
    if any(type(part) not in (int, str) for part in parts):
        return None  # the repr of another object may change, or be that of others, too
    return zlib.crc32(repr(index).encode("utf-8", "surrogatepass"))


class PassDigest:
    """The hash of one pass. The iterating thread writes it, and any thread may read it.

    Args:
        epoch: the arguments are as in `IndexDigest`.
        start: where the hash begins.
        batches: handed out already.
        digest: of them.
    """

    def __init__(self, epoch: int, *, start: int = 0, batches: int = 0, digest: int = 0) -> None:
        self.epoch = epoch
        self.reason = ""
        """Why there is no hash; empty if there is one."""
        self.is_end = False
        self._start = start
        self._held: tuple[list[IndexDigest], int, int, list[Any]] = ([], digest, batches, [])
        """The marks, the hash, the batches in it, and those since: replaced as a whole, for other threads."""
        self._room = 0
        """How many batches are hashed together; 0 before the first."""

    def add(self, batch: Sequence[Any] | np.ndarray | torch.Tensor | None) -> None:
        """Count a batch of indices; None where they cannot be told."""
        if batch is None:
            self.reason = UNKNOWN
            return
        pending = self._held[3]
        pending.append(batch)
        if len(pending) >= self._room:
            self._room = min(_BATCHES_AT_ONCE, max(1, _INDICES_AT_ONCE // max(1, len(batch))))
            if len(pending) >= self._room:
                self._held = self._hashed()

    def leave(self, *, is_end: bool = False) -> None:
        """End the pass, or note that it was left."""
        self.is_end = self.is_end or is_end
        if sum(map(len, self._held[3])) > _SHORT:
            self._held = self._hashed()

    def marks(self) -> list[IndexDigest]:
        """Return the hash at powers of two of batches, and as it is now, or at the end."""
        marks, digest, batches, _ = self._hashed()
        if self.reason or not batches:
            return [] if self.reason else marks
        now = self._as_mark(digest, batches, is_end=self.is_end)
        return marks if now in marks else [*marks, now]

    def state(self) -> list[int] | None:
        """Return `start`, `batches` and `digest` of a pass that resumes here; None where there is no hash."""
        _, digest, batches, _ = self._hashed()
        return None if self.reason else [self._start, batches, digest]

    def _hashed(self) -> tuple[list[IndexDigest], int, int, list[Any]]:
        """Return the marks, the hash after all batches, their number, and a list for those to come."""
        marks, digest, batches, pending = self._held
        marks, left = [*marks], [*pending]
        while left and not self.reason:
            next_kept = 1 << batches.bit_length()
            part, left = left[: next_kept - batches], left[next_kept - batches :]
            words = _joined(part)
            if words is None:
                self.reason = UNKNOWN
                break
            digest, batches = digest_after(digest, words), batches + len(part)
            if batches == next_kept:
                marks.append(self._as_mark(digest, batches))
        return marks, digest, batches, []

    def _as_mark(self, digest: int, batches: int, *, is_end: bool = False) -> IndexDigest:
        return IndexDigest(epoch=self.epoch, batches=batches, digest=f"{digest:016x}", start=self._start, is_end=is_end)


def _joined(batches: list[Any]) -> np.ndarray | None:
    if all(isinstance(batch, torch.Tensor) for batch in batches):
        return index_words(torch.cat(batches))
    words = [index_words(batch) for batch in batches]
    return None if any(word is None for word in words) else np.concatenate(words)  # type: ignore[arg-type]


class DigestLog:
    """The hashes of one loader's last passes. Any thread may read it at any time."""

    def __init__(self) -> None:
        self._passes: deque[PassDigest] = deque(maxlen=_MOST_MARKS)

    def begin(self, epoch: int, start: int = 0, batches: int = 0, digest: int = 0) -> PassDigest:
        """Return the hash of a pass that begins; the arguments are as in `IndexDigest`."""
        if self._passes:
            self._passes[-1].leave()
        self._passes.append(PassDigest(epoch, start=start, batches=batches, digest=digest))
        return self._passes[-1]

    def digests(self) -> tuple[IndexDigest, ...]:
        """Return what is kept: those within earlier passes go first, and then the earliest passes."""
        marks = [mark for one in [*self._passes] for mark in one.marks()]
        inner = (at for at, one in enumerate(marks) if not one.is_end and one.epoch != marks[-1].epoch)
        dropped = set(itertools.islice(inner, max(0, len(marks) - _MOST_MARKS)))
        return tuple([one for at, one in enumerate(marks) if at not in dropped][-_MOST_MARKS:])

    @property
    def reason(self) -> str:
        """Why the pass begun last has no hash; empty if it has."""
        if not self._passes:
            return ""
        self._passes[-1].marks()  # hashes what is pending, which may not be possible
        return self._passes[-1].reason
