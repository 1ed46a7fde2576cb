"""Whether large batches are made faster in reused slots, or in fresh memory as torch makes them.

Fresh memory costs its page faults, unless the C heap happens to keep the block of an earlier batch. That depends on
what else the program has freed, and may change at any time. So both ways are measured, the one in use all the time.
"""

from __future__ import annotations

import statistics

_LARGE_NBYTES = 1 << 20
"""Of a batch. Smaller ones fit into what the heap keeps, and a slot costs more than it saves."""

_WARM_UP = 3
_MEASURED = 5
_WORTH = 0.9
"""The other way must have taken at most this share of the time."""

_SHORT_EPOCH = 64
"""Batches. In fewer, the new pages of three slots cost more than slots save where the heap keeps its blocks."""

_LONGEST = 2048
"""The most batches between two looks; the number doubles with each change of the way, so that changes become rare."""


class SlotTrial:
    """Decides where a loop's next large batch is to be made. Lives as long as its loader.

    The first batches are made in slots, the next ones in fresh memory; after that the way is changed when it takes
    longer than the other one took. Slots have new pages in each epoch, so short epochs have none.
    """

    def __init__(self) -> None:
        self.uses_slots = False
        """Where the next batch is to be made."""
        self.is_wanted = True
        """Whether the next batch has to be measured, or looked at."""
        self.by_rows = False
        """Whether samples are so large that each is copied to its row of the slot as soon as it is made."""
        self._is_large = False
        self._recent: list[float] = []
        self._typical: dict[bool, float] = {}
        """What a sample takes in slots (True) and in fresh memory."""
        self._until_look = _WARM_UP + _MEASURED

    def look(self, nbytes: int, *, by_rows: bool, epoch: int | None = None) -> None:
        """Begin, if the loop's first batch is large; `epoch` is how many batches an epoch has, if that is known."""
        if not self._is_large:
            is_short = epoch is not None and epoch < _SHORT_EPOCH
            self._is_large = self.is_wanted = self.uses_slots = nbytes >= _LARGE_NBYTES and not is_short
            self.by_rows = by_rows

    def add(self, ns_per_sample: float) -> None:
        """Record a batch that was made as `uses_slots` says."""
        if not self._is_large:
            return
        self._recent.append(ns_per_sample)
        if len(self._recent) < self._until_look:
            return
        typical = self._typical[self.uses_slots] = statistics.median(self._recent[-_MEASURED:])
        self._recent.clear()
        other = self._typical.get(not self.uses_slots)
        if other is None or other <= _WORTH * typical:
            self.uses_slots = not self.uses_slots
        if other is not None:
            self._until_look = min(2 * self._until_look, _LONGEST)
