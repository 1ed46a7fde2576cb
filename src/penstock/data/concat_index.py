"""Which part has sample i, if parts (files, row groups) are numbered one after another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate

import numpy as np


class ConcatIndex:
    """Numbers the samples of parts that follow each other; parts may be empty.

    Args:
        counts: how many samples each part holds.

    >>> index = ConcatIndex([3, 0, 4])
    >>> len(index), index.locate(2), index.locate(3)
    (7, (0, 2), (2, 0))
    """

    def __init__(self, counts: Iterable[int]) -> None:
        self._array = np.zeros(0, np.int64)
        self.starts = [0, *accumulate(counts)]
        """The number at which each part begins, and how many all hold."""

    def __len__(self) -> int:
        return self.starts[-1]

    def locate(self, index: int) -> tuple[int, int]:
        """Return the part that has sample `index`, and its number in the part."""
        part = bisect_right(self.starts, index) - 1
        return part, index - self.starts[part]

    def split(self, indices: np.ndarray) -> Iterator[tuple[int, np.ndarray | slice, np.ndarray]]:
        """Yield, of each part that has some of these samples, its number, their places in `indices`, their own numbers.

        >>> [(part, own.tolist()) for part, _, own in ConcatIndex([3, 0, 4]).split(np.array([4, 0, 6]))]
        [(0, [0]), (2, [1, 3])]
        """
        if not len(indices):
            return
        if len(self.starts) == 2:
            yield 0, slice(None), indices
            return
        if len(self._array) != len(self.starts):
            self._array = np.array(self.starts, np.int64)
        parts = np.searchsorted(self._array, indices, "right") - 1
        first = int(parts[0])
        if (parts == first).all():
            yield first, slice(None), indices - self.starts[first]
            return
        for part in np.unique(parts).tolist():
            places = np.flatnonzero(parts == part)
            yield part, places, indices[places] - self.starts[part]
