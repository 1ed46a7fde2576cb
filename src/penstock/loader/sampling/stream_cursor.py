"""StreamCursor: the position in an iterable dataset, shard by shard, counting only batches that were handed out.

A shard's position is the last state that its dataset (or iterator) has returned, and the batches handed out since then.
A dataset that keeps no state is run through again from its beginning. A map-style dataset that keeps a state has a
shard in each worker, of which that state is all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from penstock.loader.workers.stream_shard import StreamShard


class Consumed(NamedTuple):
    """What handing out one batch consumes: its number, and the shard that it came from."""

    number: int
    shard: int = 0
    state: Any = None
    """Of the shard after the batch, or of its dataset at the end, where a state was asked for."""
    has_ended: bool = False


class StreamCursor:
    """The positions of the shards of one pass.

    Args:
        shards: as the pass begins.
        turn: the shard whose batch comes first.
        size: samples of a batch; None for a map-style dataset.
        current: returns a shard as it is now; set where no batch is made ahead, so that states are read on demand.
    """

    def __init__(
        self,
        shards: Sequence[StreamShard],
        turn: int,
        size: int | None,
        current: Callable[[int, StreamShard], StreamShard] | None = None,
    ) -> None:
        self._shards = [*shards]
        self._batches = [0] * len(self._shards)
        """Handed out, by shard, since its entry in `_shards` was made."""
        self.current = current
        self._size = size
        self.turn = turn

    @property
    def shards(self) -> list[StreamShard]:
        """The shards as they are now."""
        for place, batches in enumerate(self._batches):
            self._shards[place] = self._shards[place].after(self._size, batches=batches)
        self._batches = [0] * len(self._shards)
        return self._shards

    def consume(self, batches: Sequence[Consumed]) -> None:
        """Record that these batches have been handed out."""
        for batch in batches:
            self.turn = (batch.shard + 1) % len(self._shards)
            if batch.has_ended:
                self._batches[batch.shard] = 0  # what has ended begins anew
                self._shards[batch.shard] = self._shards[batch.shard].at_end(batch.state)
            elif batch.state is not None:
                shards = self.shards
                shards[batch.shard] = shards[batch.shard].after(self._size, batch.state)
            else:
                self._batches[batch.shard] += 1

    def state(self) -> list[dict[str, Any]]:
        """Return the shards as plain values."""
        return [self._shard_state(place, shard) for place, shard in enumerate(self.shards)]

    def _shard_state(self, place: int, shard: StreamShard) -> dict[str, Any]:
        if self.current is not None:
            shard = self.current(place, shard)
        where: dict[str, Any] = {"ended": shard.has_ended, "end": shard.end}
        if not shard.has_ended:
            where |= {"state": shard.state, "since": [list(pair) for pair in shard.since]}
        return {"number": shard.number, "of": shard.of, "rank": shard.rank, **where}


def shard_from(state: dict[str, Any]) -> StreamShard:
    """Return the shard that an entry of `StreamCursor.state` describes."""
    name = {"number": state["number"], "of": state["of"], "rank": state["rank"]}
    if state["ended"]:
        return StreamShard(**name, has_ended=True, end=state["end"])
    since = tuple((int(batches), int(size)) for batches, size in state["since"])
    return StreamShard(**name, state=state["state"], since=since, end=state["end"])
