"""Whether copying ahead pays in this loop: measured in its first steps, with it and without it by turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

_WARM_UP = 4
_BLOCK = 8
_BLOCKS = 4
_COSTS = 1.02
"""Copying ahead is dropped when a step takes longer with it by this much."""


class DepthTrial:
    """Chooses how many batches to copy ahead: `depth`, or none.

    After a warm-up, blocks of steps with copies ahead and without them take turns; the median time from batch to batch
    decides. It says what it found in `evidence`. Lives as long as its loader, so that a decision holds for all epochs.

    Args:
        depth: what there is to choose.
        clock: seconds.
    """

    def __init__(self, depth: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.depth = depth
        self.evidence = f"up to {depth} ahead, for now"
        self._most = depth
        self._clock = clock
        self._steps = 0
        self._last: float | None = None
        self._intervals: dict[bool, list[float]] = {True: [], False: []}

    def pause(self) -> None:
        """Leave out the time to the next step: an epoch begins."""
        self._last = None

    def step(self) -> None:
        """Take note that a batch is asked for; `depth` may change."""
        if self._steps > _BLOCK * _BLOCKS:
            return
        now = self._clock()
        place = self._steps % _BLOCK
        if self._last is not None:
            if self._steps >= _BLOCK or place >= _WARM_UP:
                self._note(now - self._last, place)
            self._steps += 1
        self._last = now
        if self._steps == _BLOCK * _BLOCKS:
            self._decide()
        else:
            self.depth = self._most if self._is_ahead() else 0

    def _is_ahead(self) -> bool:
        return self._steps // _BLOCK % 2 == 0

    def _note(self, seconds: float, place: int) -> None:
        if place > 1:  # the first steps of a block still profit, or suffer, from the one before
            self._intervals[self._is_ahead()].append(seconds)

    def _decide(self) -> None:
        self._steps += 1
        ahead, direct = (statistics.median(self._intervals[way]) * 1e3 for way in (True, False))
        pays = ahead < direct * _COSTS
        self.depth = self._most if pays else 0
        self.evidence = (
            f"{f'up to {self._most}' if pays else 'none'} ahead: a step took {ahead:.2f} ms with copies ahead and "
            f"{direct:.2f} ms without"
        )
