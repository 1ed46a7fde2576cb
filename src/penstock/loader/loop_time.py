"""The time that loops over loaders take in one thread, each moment counted once, however the loops are nested.

A loop inside of another's step (a validation after every hundred batches) lies in that step, and two loaders that are
zipped have the same steps. So each loop notes how much of its steps other loops have counted, for sums over loaders.
Of a step that begins in one thread and ends in another, nothing is known: it counts as its loop's alone.
"""

from __future__ import annotations

import itertools
import threading

_APART_NS = 1 << 62
"""Threads count from numbers this far apart, so that another thread's mark is seen to be one."""

_threads = itertools.count()


class LoopTime(threading.local):
    """Nanoseconds of this thread's loops."""

    def __init__(self) -> None:
        self.counted_ns = next(_threads) * _APART_NS

    def others_ns(self, mark: int, passed_ns: int) -> int:
        """Return how much of `passed_ns` loops have counted since `counted_ns` was `mark`."""
        others_ns = self.counted_ns - mark
        return min(others_ns, passed_ns) if 0 < others_ns < _APART_NS // 2 else 0

    def count(self, mark: int, passed_ns: int) -> int:
        """Count what nobody has counted of `passed_ns`, which began at `mark`; return the mark of what comes next.

        >>> time = LoopTime()
        >>> start = time.counted_ns
        >>> within = time.count(start, 5)
        >>> time.count(start, 8) - start
        8
        """
        counted_ns = self.counted_ns
        if counted_ns != mark:  # hardly ever
            passed_ns -= self.others_ns(mark, passed_ns)
        self.counted_ns = counted_ns = counted_ns + passed_ns
        return counted_ns


loop_time = LoopTime()
