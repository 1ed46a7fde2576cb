"""EpochState: one pass of a loop over a loader: where it began, its randomness, and what has been handed out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.loader.sampling.batch_cursor import BatchCursor
from penstock.loader.sampling.index_digest import PassDigest
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
    batch_cursor: BatchCursor | None
    """Of a map-style dataset."""
    rank: int
    world: int
    order: Order
    """Of a map-style dataset's indices."""
    digest: PassDigest
    """Of what has been handed out."""
    shards: Sequence[StreamShard] = ()
    """Of an iterable dataset, and of a map-style one that keeps a state; else empty."""
    turn: int = 0
    """The shard whose batch comes first."""
    shard_cursor: StreamCursor | None = None
    """Where there are shards."""
    stream_epoch: int | None = None
    """The epoch that one of penstock's streams or mixtures was set to."""
    keeps_dataset: bool = False
    """Whether the next pass reads the same dataset object, with what it remembers, and not a new worker's copy."""
    is_whole: bool = True
    """Whether it begins with the epoch."""
    leads_on: bool = False
    """Whether the next epoch is to come if nothing is left of this one."""
    wants_states: bool = False
    """Whether each batch has to carry the state of its shard after it, because the loop holds some back."""
    finished: bool = False
    handed_out: int = 0
    """Batches of this pass."""

    def consume(self, consumed: Sequence[Consumed]) -> None:
        """Record a batch that was handed out, and those before it that had nothing to hand out."""
        if self.shard_cursor is None and self.batch_cursor is not None and len(consumed) == 1:
            self.batch_cursor.consume_one(consumed[0].number)
            return
        self._advance(consumed)

    def finish(self, consumed: Sequence[Consumed]) -> None:
        """Record the end, and the batches before it that had nothing to hand out."""
        if consumed:
            self._advance(consumed)
        self.digest.leave(is_end=True)
        self.finished = True

    def _advance(self, consumed: Sequence[Consumed]) -> None:
        if self.batch_cursor is not None:
            self.batch_cursor.consume([one.number for one in consumed])
        if self.shard_cursor is not None:
            self.shard_cursor.consume(consumed)

    def read_shards_with(self, current: Callable[[int, StreamShard], StreamShard]) -> None:
        """Use `current` to read a shard's state when it is asked for; possible where no batch is made ahead."""
        if self.shard_cursor is not None:
            self.shard_cursor.current = current

    def as_dict(self) -> dict[str, Any]:
        """Return the position as plain values, for a checkpoint."""
        state: dict[str, Any] = {
            "epoch": self.number,
            "finished": self.finished,
            "rank": self.rank,
            "world": self.world,
            "digest": self.digest.state(),
        }
        if self.batch_cursor is not None:
            state["indices"] = self.batch_cursor.state().as_dict()
            if self.finished or not self.batch_cursor.has_drawn:
                state["sampler"] = self.order.end_state()
        if self.shard_cursor is not None:
            state |= {"shards": self._shard_states(), "turn": self.shard_cursor.turn}
        return state

    def _shard_states(self) -> list[dict[str, Any]]:
        """Return the shards; without what only an object remembers that the next pass does not have."""
        assert self.shard_cursor is not None
        shards = self.shard_cursor.state()
        if self.keeps_dataset:
            return shards
        forgotten = {"end": None}
        if self.batch_cursor is not None and self.finished:
            forgotten["state"] = None
        return [{**shard, **forgotten} for shard in shards]
