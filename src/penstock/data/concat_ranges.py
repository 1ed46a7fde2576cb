"""concat_ranges: the numbers of several ranges, one range after another."""

from __future__ import annotations

import numpy as np


def concat_ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return consecutive numbers, `sizes` of them from each of `starts` on, int64[sum of sizes].

    >>> concat_ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(sizes)
    found: np.ndarray = np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1] if len(ends) else 0)
    return found
