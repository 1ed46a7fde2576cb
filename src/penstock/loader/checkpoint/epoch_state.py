"""EpochState: one pass of a loop over a loader: where it began, its randomness, and what has been handed out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.loader.sampling.batch_cursor import BatchCursor
from penstock.loader.sampling.orders import Order
from penstock.loader.sampling.stream_cursor import Consumed, StreamCursor
from penstock.loader.workers.stream_shard import StreamShard


@dataclass(kw_only=True)
class EpochState:
    """One pass. Mutable: the cursor moves with every batch that is handed out."""

    number: int
    """Of the epoch, from 0."""
    indices: Iterator[Any]
    base_seed: int
    """Of the workers' random states, as torch draws it."""
    epoch_seed: int
    """What the randomness of samples depends on."""
    shards: Sequence[StreamShard]
    """Of an iterable dataset; empty for a map-style one."""
    turn: int
    """The shard whose batch comes first."""
    cursor: BatchCursor | StreamCursor
    rank: int
    world: int
    stream_epoch: int | None
    """The epoch that one of penstock's streams was set to."""
    order: Order
    """Of a map-style dataset's indices."""
    generator: torch.Tensor | None = None
    """The state of the loader's generator before anything was drawn from it."""
    keeps_dataset: bool = False
    """Whether the next pass reads the same dataset object, with what it remembers, and not a new worker's copy."""
    finished: bool = False

    def consume(self, consumed: Sequence[Consumed]) -> None:
        """Record what has been handed out."""
        if isinstance(self.cursor, BatchCursor):
            self.cursor.consume([one.number for one in consumed])
        else:
            self.cursor.consume(consumed)

    def finish(self, consumed: Sequence[Consumed]) -> None:
        """Record the end, and the batches before it that had nothing to hand out."""
        self.consume(consumed)
        self.finished = True

    def read_shards_with(self, current: Callable[[int, StreamShard], StreamShard]) -> None:
        """Use `current` to read a shard's state when it is asked for; possible where no batch is made ahead."""
        if isinstance(self.cursor, StreamCursor):
            self.cursor.current = current

    def as_dict(self) -> dict[str, Any]:
        """Return the position as plain values, for a checkpoint."""
        where = self._index_state() if isinstance(self.cursor, BatchCursor) else self._shard_states()
        return {"epoch": self.number, "finished": self.finished, "rank": self.rank, "world": self.world, **where}

    def _index_state(self) -> dict[str, Any]:
        assert isinstance(self.cursor, BatchCursor)
        state = {"indices": self.cursor.state().as_dict()}
        if self.finished:
            return {**state, "sampler": self.order.end_state()}
        if self.cursor.has_drawn:
            return state
        return {**state, "generator": self.generator, "sampler": self.order.end_state()}

    def _shard_states(self) -> dict[str, Any]:
        assert isinstance(self.cursor, StreamCursor)
        shards = self.cursor.state()
        if not self.keeps_dataset:
            shards = [{**shard, "end": None} for shard in shards]
        return {"shards": shards, "turn": self.cursor.turn, "stream_epoch": self.stream_epoch}
