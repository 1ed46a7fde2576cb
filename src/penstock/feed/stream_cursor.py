"""The cursor of an iterable dataset: where each of its lanes is, as far as their batches have been handed out.

A lane's place is the last state that its dataset (or iterator) has told, and the batches that were handed out since.
A dataset that keeps no state is run through again, from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.feed.workers.lanes import Lane


@dataclass(frozen=True, slots=True)
class Used:
    """What one batch that was handed out stands for: its number, and the lane that it was cut from."""

    number: int
    lane: int = 0
    state: Any = None
    """Of the lane after it, or of its dataset at the end, where it was asked for."""
    has_ended: bool = False


class StreamCursor:
    """Where the lanes of one pass are.

    Args:
        lanes: as they begin.
        turn: the one whose batch comes first.
        size: samples of a batch.
        look: returns a lane as it is now, where batches are made only when they are asked for.
    """

    def __init__(
        self, lanes: Sequence[Lane], turn: int, size: int, look: Callable[[int, Lane], Lane] | None = None
    ) -> None:
        self.lanes = [*lanes]
        self.look = look
        self._size = size
        self.turn = turn

    def used(self, batches: Sequence[Used]) -> None:
        """Take note that these have been handed out."""
        for batch in batches:
            self.turn = (batch.lane + 1) % len(self.lanes)
            if batch.has_ended:
                self.lanes[batch.lane] = replace(self.lanes[batch.lane], has_ended=True, end=batch.state)
            else:
                self.lanes[batch.lane] = self.lanes[batch.lane].after(self._size, batch.state)

    def taken(self) -> list[dict[str, Any]]:
        """Return the lanes in plain words."""
        return [self._told(place) for place in range(len(self.lanes))]

    def _told(self, place: int) -> dict[str, Any]:
        lane = self.lanes[place]
        if self.look is not None:
            lane = self.look(place, lane)
        where: dict[str, Any] = {"ended": lane.has_ended, "end": lane.end}
        if not lane.has_ended:
            where |= {"state": lane.state, "since": [list(pair) for pair in lane.since]}
        return {"number": lane.number, "of": lane.of, "rank": lane.rank, **where}


def lane_of(told: dict[str, Any]) -> Lane:
    """Return a lane from what `StreamCursor.taken` has told of it."""
    name = {"number": told["number"], "of": told["of"], "rank": told["rank"]}
    if told["ended"]:
        return Lane(**name, has_ended=True, end=told["end"])
    since = tuple((int(batches), int(size)) for batches, size in told["since"])
    return Lane(**name, state=told["state"], since=since, end=told["end"])
