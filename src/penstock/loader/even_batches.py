"""EvenBatches: a stream's batches, as many on each of the ranks that share the stream out.

A rank does not know how many batches it has before it has read them, and a rank that takes one more than another waits
for it for ever in the next collective. So some batches are made before the first of them is handed out, and ranks tell
each other how many they have (`StepCounts`).

    drop    what a rank has beyond the fewest is left out
    pad     ranks go on to the most that one has, with the first batches of their share again

The first batch of an epoch is handed out without a word: each rank has one, and may look at it alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from penstock.core.errors import RankError
from penstock.distributed.step_counts import StepCounts
from penstock.loader.sampling.stream_cursor import Consumed

AT_ONCE = 4
"""Batches that ranks agree on together."""

Made = tuple[Any, Sequence[Consumed]]
"""A batch, and what handing it out consumes."""


class EvenBatches:
    """The batches of one pass of this rank.

    Args:
        counts: of the ranks.
        pads: whether ranks that have fewer batches repeat some; else those that have more leave them out.
        is_whole: whether the pass begins with the epoch, so that each rank has a batch.
        again: begins to read this rank's share from its beginning.
        check: raises where another rank has failed.
    """

    def __init__(
        self,
        counts: Callable[[], StepCounts],
        *,
        pads: bool,
        is_whole: bool,
        again: Callable[[], Iterator[Any]],
        check: Callable[[], None],
    ) -> None:
        self._counts = counts
        self._pads = pads
        self._again = again
        self._check = check
        self._made: deque[Made] = deque()
        self._has_ended = False
        """Whether this rank has no more of its own."""
        self._granted = 0
        """How many batches may be handed out before ranks agree again."""
        self._is_last = False
        """Whether none come after those."""
        self._repeated: Iterator[Any] = iter(())
        self._is_first = is_whole

    def next_batch(self, make: Callable[[], Made]) -> Made:
        """Return the next batch.

        Args:
            make: returns the next batch that this rank reads; raises StopIteration when there is none.

        Raises:
            StopIteration: all ranks have had as many.
            RankError: this rank has no sample, or another has failed or does not answer.
        """
        if self._is_first:
            self._is_first, self._granted = False, 1
            self._read(make, 1)
            if not self._made:
                raise RankError(
                    "this rank has no batch of the stream, and others may have some, so that they would wait for it; "
                    "use fewer ranks and workers, more shards or drop_last=False, or uneven='join'"
                )
        if not self._granted and not self._is_last:
            self._read(make, AT_ONCE)
            fewest, most = self._counts().agree(len(self._made), AT_ONCE, self._check)
            self._granted = most if self._pads else fewest
            self._is_last = self._granted < AT_ONCE
        if not self._granted:
            raise StopIteration
        self._granted -= 1
        return self._made.popleft() if self._made else (self._repeat(), ())

    def _read(self, make: Callable[[], Made], count: int) -> None:
        while len(self._made) < count and not self._has_ended:
            try:
                self._made.append(make())
            except StopIteration:
                self._has_ended = True

    def _repeat(self) -> Any:
        """Return the first batches of this rank's share again; the program's random state stays as it is."""
        with torch.random.fork_rng(devices=()):
            for _ in range(2):
                for batch in self._repeated:
                    return batch
                self._repeated = self._again()
        raise RankError("this rank has no batch of the stream that it could repeat; use uneven='drop' or 'join'")
