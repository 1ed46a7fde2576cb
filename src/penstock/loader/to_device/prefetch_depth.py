"""Whether copying ahead pays in this loop: measured in its first steps, alternating between with and without it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

BLOCK = 8
PAIRS = 3
_COSTS = 1.02
"""Copying ahead is dropped when steps take longer with it by this much, in every comparison."""


class DepthTrial:
    """Chooses how many batches to copy ahead: `depth`, or none.

    Blocks of steps with copies ahead and without them alternate. Each begins and ends with an idle device (`settle`):
    a host that only submits work would otherwise be timed instead of it. `summary` describes the result. Lives as
    long as its loader, so that a decision holds for all epochs.

    Args:
        depth: how many to copy ahead, if that pays.
        clock: seconds.
    """

    def __init__(self, depth: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.depth = depth
        self.summary = f"up to {depth} ahead, for now"
        self._most = depth
        self._clock = clock
        self._step_s: list[float] = []
        """Of each block, beginning with the warm-up."""
        self._in_block = 0
        self._began = 0.0

    def pause(self) -> None:
        """Restart the block, because an epoch begins or ends."""
        self._in_block = 0

    def step(self, settle: Callable[[], object]) -> None:
        """Record that a batch is asked for; `depth` may change. `settle` waits until the device is idle."""
        if len(self._step_s) > 2 * PAIRS:
            return
        if self._in_block == BLOCK:
            settle()
            self._step_s.append((self._clock() - self._began) / BLOCK)
            self._in_block = 0
            if len(self._step_s) > 2 * PAIRS:
                self._decide()
                return
        if self._in_block == 0:
            settle()
            self.depth = self._most if len(self._step_s) % 2 == 0 else 0
            self._began = self._clock()
        self._in_block += 1

    def _decide(self) -> None:
        direct, ahead = self._step_s[1::2], self._step_s[2::2]
        ratios = [one / other for one, other in zip(ahead, direct, strict=True)]
        pays = min(ratios) <= _COSTS
        self.depth = self._most if pays else 0
        ahead_ms, direct_ms = statistics.median(ahead) * 1e3, statistics.median(direct) * 1e3
        self.summary = (
            f"{f'up to {self._most}' if pays else 'none'} ahead: a step took {ahead_ms:.2f} ms with copies ahead and "
            f"{direct_ms:.2f} ms without"
        )
