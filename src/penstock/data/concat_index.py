"""Which part has sample i, if parts (files, row groups) are numbered one after another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate


class ConcatIndex:
    """Numbers the samples of parts that follow each other; parts may be empty.

    Args:
        counts: how many samples each part holds.

    >>> index = ConcatIndex([3, 0, 4])
    >>> len(index), index.locate(2), index.locate(3)
    (7, (0, 2), (2, 0))
    """

    def __init__(self, counts: Iterable[int]) -> None:
        self.starts = [0, *accumulate(counts)]
        """The number at which each part begins, and how many all hold."""

    def __len__(self) -> int:
        return self.starts[-1]

    def locate(self, index: int) -> tuple[int, int]:
        """Return the part that has sample `index`, and its number in the part."""
        part = bisect_right(self.starts, index) - 1
        return part, index - self.starts[part]
