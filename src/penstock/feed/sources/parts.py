"""Which part has sample i: files, groups or films that follow each other, as one row of numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate


class Parts:
    """Parts that follow each other, some of them perhaps empty.

    Args:
        counts: how many each holds.

    >>> parts = Parts([3, 0, 4])
    >>> len(parts), parts.place(2), parts.place(3)
    (7, (0, 2), (2, 0))
    """

    def __init__(self, counts: Iterable[int]) -> None:
        self.starts = [0, *accumulate(counts)]
        """The number at which each part begins, and how many all hold."""

    def __len__(self) -> int:
        return self.starts[-1]

    def place(self, index: int) -> tuple[int, int]:
        """Return which part has number `index`, and its number there."""
        part = bisect_right(self.starts, index) - 1
        return part, index - self.starts[part]
