"""How many instructions of Python's interpreter the main thread executes for a batch.

The count is exact, however busy the machine is: `sys.settrace` reports each instruction (`f_trace_opcodes`). What C
code does is not counted. A count belongs to one version of Python: other versions have other instructions.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable
from statistics import median
from types import FrameType
from typing import Any

SKIPPED = 5
"""Batches at the beginning of a pass, which are not in a steady state."""


class InstructionCounter:
    """Counts what this thread executes between `start` and `stop`, but for the frame that calls them."""

    def __init__(self) -> None:
        self._count = 0
        for _ in range(2):  # Python 3.12 reports instructions only after a frame of the process has asked for them once
            self.start()
            _nothing()
            self.stop()

    def start(self) -> None:
        """Begin at 0."""
        self._count = 0
        sys.settrace(self._trace)

    def stop(self) -> int:
        """Return the count."""
        sys.settrace(None)
        return self._count - _OF_STOP

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._count += 1
        return self._trace


def _nothing() -> None: ...


def _count_of_stop() -> int:
    """Return how many instructions of `stop` itself are counted."""
    counter = InstructionCounter()
    counter.start()
    return counter.stop()


_OF_STOP = 0
_OF_STOP = _count_of_stop()


def count_instructions(
    loader: Iterable[Any], moved: Callable[[Any], Any], *, passes: int = 2, gap_s: float = 0.01
) -> dict[str, Any]:
    """Return the counts of `iter(loader)` and of a batch in steady state.

    A batch's are those of `next`, of `moved`, and of dropping the batch before. In the `passes` before, workers start
    and slots are made. `gap_s` lies between two batches, so that the next one has come by then.
    """
    for _ in range(passes):
        for batch in loader:
            moved(batch)
            time.sleep(gap_s)
    counter, counts = InstructionCounter(), []
    gc.collect()
    gc.disable()
    try:
        counter.start()
        batches = iter(loader)
        begun = counter.stop()
        while True:
            counter.start()
            try:
                batch = next(batches)
                batch = moved(batch)
            except StopIteration:
                break
            finally:
                counts.append(counter.stop())
            time.sleep(gap_s)
    finally:
        gc.enable()
    steady = counts[SKIPPED:-1]
    return {"batch": median(steady), "least": min(steady), "most": max(steady), "iter": begun}
