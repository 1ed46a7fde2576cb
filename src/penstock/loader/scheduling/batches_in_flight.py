"""The batches of one epoch that are under way, and the order in which they are handed out."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from penstock.loader.sampling.stream_cursor import Consumed
from penstock.loader.scheduling.batch import Batch
from penstock.loader.transport.ring import Ring


class BatchWindow:
    """From `add` (a batch is sent to the workers) through `settle` (it is finished) to `pop_ready` (it is handed out).

    In order, a batch waits for those before it. Out of order, the batch that is finished first is handed out first.
    """

    def __init__(self, *, in_order: bool) -> None:
        self.under_way = 0
        """Batches that were added and have not been handed out."""
        self.next_number = 0
        """The number of the next batch to add."""
        self.next_out = 0
        """In order, the number of the next batch to hand out."""
        self.consumed_since: list[Consumed] = []
        """What was used up since the last batch that was handed out: that batch's own, and batches without samples."""
        self._in_order = in_order
        self._batches: dict[int, Batch] = {}
        """All of them, except that out of order those that are finished are in `_ready`."""
        self._ready: deque[Batch] = deque()

    def add(self, batch: Batch) -> None:
        """Add the batch whose number is `next_number`."""
        self._batches[batch.number] = batch
        self.next_number += 1
        self.under_way += 1

    def get(self, number: int) -> Batch | None:
        """Return a batch that has not been handed out, by its number."""
        return self._batches.get(number)

    def tasks_left(self) -> int:
        """Return how many tasks have no result."""
        return sum(batch.tasks_left for batch in self._batches.values())

    def settle(self, batch: Batch) -> None:
        """Out of order: move a finished batch to where it will be handed out."""
        del self._batches[batch.number]
        self._ready.append(batch)  # an empty one, too: it may be the end of a shard with batches before it here

    def pop_ready(self) -> Batch | None:
        """Return the batch to hand out next, if it is finished."""
        while True:
            if self._in_order:
                batch = self._batches.get(self.next_out)
                if batch is None or batch.tasks_left:
                    return None
                del self._batches[self.next_out]
                self.next_out += 1
            elif self._ready:
                batch = self._ready.popleft()
            else:
                return None
            self.under_way -= 1
            self.consumed_since.append(batch.consumed)
            if not batch.is_empty:
                return batch

    def take_consumed(self) -> list[Consumed]:
        """Return `consumed_since`, and begin a new one."""
        consumed, self.consumed_since = self.consumed_since, []
        return consumed

    def cancel(self, ring: Ring) -> None:
        """Cancel all batches; slots of those that workers still fill are freed with their last task."""
        for batch in self._batches.values():
            batch.cancelled = True
            if batch.tasks_left == 0:
                batch.drop(ring)
        self._batches.clear()
        for batch in self._ready:
            batch.drop(ring)
        self._ready.clear()

    def count_ready(self, finished: Counter[Any]) -> int:
        """Return how many batches are finished, given how many of their tasks wait to be collected.

        May be called by any thread, and raises a RuntimeError if the window changed meanwhile.
        """
        batches = list(self._batches.values())
        finished_batches = [batch for batch in batches if batch.tasks_left <= finished[batch]]
        return sum(not batch.is_empty for batch in [*finished_batches, *self._ready])
