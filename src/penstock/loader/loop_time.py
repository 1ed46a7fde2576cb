"""The time that loops over loaders take in one thread, each moment counted once, however the loops are nested.

A loop inside of another's step (a validation after every hundred batches) lies in that step, and two loaders that are
zipped have the same steps. So each loop notes how much of its steps other loops have counted, for sums over loaders.
"""

from __future__ import annotations

import threading


class LoopTime(threading.local):
    """Nanoseconds of this thread's loops."""

    counted_ns = 0

    def others_ns(self, mark: int, passed_ns: int) -> int:
        """Return how much of `passed_ns` loops have counted since `counted_ns` was `mark`."""
        others_ns = self.counted_ns - mark
        return min(max(0, others_ns), passed_ns) if others_ns else 0

    def count(self, mark: int, passed_ns: int) -> int:
        """Count what nobody has counted of `passed_ns`, which began at `mark`; return the mark of what comes next.

        >>> time = LoopTime()
        >>> within = time.count(time.counted_ns, 5)
        >>> time.count(0, 8)
        8
        """
        counted_ns = self.counted_ns
        if counted_ns != mark:  # hardly ever
            passed_ns -= self.others_ns(mark, passed_ns)
        self.counted_ns = counted_ns = counted_ns + passed_ns
        return counted_ns


loop_time = LoopTime()
