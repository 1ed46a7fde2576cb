"""One pass over one consumer's share of a stream: records in order or in shuffled blocks, from any saved position.

A shuffled pass reads `interleave` shards round-robin into a block of `shuffle_block` records, and permutes the block.
Its position is where the block begins and how many of the block's records were returned, so a resumed pass reads at
most one block again. A pass that is not shuffled has no blocks, and its position is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.core.errors import RecordError, SourceError
from penstock.data.schema import Sample
from penstock.data.stream_order import PassSpec, ReadOrder, Shard, ShardRange, assign_ranges

ReadShard = Callable[[Shard, int, int], Iterator[Sample | RecordError]]
"""`Stream.read`: the records of a shard from one number, with a step."""


@dataclass(slots=True)
class Position:
    """Where a pass is: the beginning of its block, and how many records of the block have been returned."""

    block: int = 0
    returned: int = 0
    next_range: int = 0
    open: list[tuple[int, int]] = field(default_factory=list)
    """Ranges that are being read, and how many records of each came before this block."""
    turn: int = 0
    """Which of `open` the block's first record comes from."""

    def to_state(self) -> dict[str, Any]:
        """Return what `from_state` takes. Workers send it with every batch, and `asdict` is slow."""
        return {
            "block": self.block,
            "returned": self.returned,
            "next_range": self.next_range,
            "open": [*self.open],
            "turn": self.turn,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Position:
        """Return the position that `to_state` has described."""
        return cls(**{**state, "open": [(int(number), int(count)) for number, count in state["open"]]})


class RecordPass:
    """An iterator over records, and a RecordError in the place of each broken one. Iteration can resume after an error.

    Args:
        read: opens a shard.
        shards: of the stream.
        order: in which they are read.
        spec: which pass, and whose share of it.
        position: where to begin; None for the beginning.
        splits: [turn, consumers, records so far] of each time that this share was split among several consumers.
    """

    def __init__(
        self,
        read: ReadShard,
        shards: Sequence[Shard],
        order: ReadOrder,
        spec: PassSpec,
        position: Position | None = None,
        splits: Sequence[Sequence[int]] = (),
    ) -> None:
        self.spec = spec
        self._position = position or Position()
        self._live: tuple[Iterator[Sample | RecordError], int] | None = None
        """The shard that is read in order, and its range: what is counted here is not in `_position` yet."""
        self._live_count = 0
        self.splits = [[*split] for split in splits]
        self._read = read
        self._shards = shards
        self._order = order
        self._ranges = assign_ranges(order, len(shards), spec)
        self._readers: dict[int, Iterator[Sample | RecordError]] = {}
        self._block: list[Sample | RecordError] | None = None
        self._next_block = self.position
        self._is_whole = not order.shuffle and not self.splits

    @property
    def position(self) -> Position:
        """Where the pass is."""
        if self._live is not None:
            self._position.open = [(self._live[1], self._live_count)]
        return self._position

    @position.setter
    def position(self, position: Position) -> None:
        self._position = position

    def __iter__(self) -> RecordPass:
        return self

    def __next__(self) -> Sample | RecordError:
        if self._is_whole and self._live is not None:
            record = self._next_of_range(self._live[1], self._live_count, self._live[0])
            if record is not None:
                self._live_count += 1
                return record
            self._live, self._position.open = None, []
        while True:
            record = self._next_in_block() if self._order.shuffle else self._next_in_order()
            if self._is_in_share():
                return record

    def close(self) -> None:
        """Close the shards that are open."""
        for reader in self._readers.values():
            close = getattr(reader, "close", None)
            if close is not None:
                close()
        self._readers.clear()

    def _is_in_share(self) -> bool:
        """Count a record, and return whether it is this consumer's in every split."""
        for split in self.splits:
            turn, consumers, count = split
            split[2] += 1
            if count % consumers != turn:
                return False
        return True

    def _next_in_block(self) -> Sample | RecordError:
        while self._block is None or self.position.returned >= len(self._block):
            if self._block is not None:
                self._next_block.block = self.position.block + 1
                self.position = self._next_block
            self._block = self._read_block()
            if not self._block:
                self.close()
                raise StopIteration
        record = self._block[self.position.returned]
        self.position.returned += 1
        return record

    def _next_in_order(self) -> Sample | RecordError:
        position, self._live = self.position, None
        while True:
            if not position.open:
                if position.next_range >= len(self._ranges):
                    self.close()
                    raise StopIteration
                position.open = [(position.next_range, 0)]
                position.next_range += 1
            number, count = position.open[0]
            record = self._next_of_range(number, count)
            if record is not None:
                position.open = [(number, count + 1)]
                if self._is_whole and number in self._readers:
                    self._live, self._live_count = (self._readers[number], number), count + 1
                return record
            position.open = []

    def _read_block(self) -> list[Sample | RecordError]:
        """Return the block that begins at `position`, and set `_next_block` to where the one after it begins."""
        position = self.position
        open_ranges, turn, next_range = list(position.open), position.turn, position.next_range
        block: list[Sample | RecordError] = []
        while len(block) < self._order.shuffle_block:
            while len(open_ranges) < self._order.interleave and next_range < len(self._ranges):
                open_ranges.append((next_range, 0))
                next_range += 1
            if not open_ranges:
                break
            turn %= len(open_ranges)
            number, count = open_ranges[turn]
            record = self._next_of_range(number, count)
            if record is None:
                open_ranges.pop(turn)
                continue
            block.append(record)
            open_ranges[turn] = (number, count + 1)
            turn += 1
        self._next_block = Position(next_range=next_range, open=open_ranges, turn=turn)
        permutation = self.spec.block_rng(position.block).permutation(len(block))
        return [block[index] for index in permutation]

    def _next_of_range(
        self, number: int, count: int, reader: Iterator[Sample | RecordError] | None = None
    ) -> Sample | RecordError | None:
        """Return the record of a range after its first `count`; None at its end."""
        try:
            record = next(reader or self._reader(number, count), None)
        except SourceError as error:  # the rest of this shard cannot be read; the others can
            record = self._shard_error(error, number, count)
            self._readers[number] = iter(())
            if reader is not None:
                self._live = self._readers[number], number
        if record is None:
            self._readers.pop(number, None)
        return record

    def _shard_error(self, error: SourceError, number: int, count: int) -> RecordError:
        if isinstance(error, RecordError):
            return error
        one = self._ranges[number]
        name = self._shards[one.shard].name
        return RecordError(name, -1, one.record(count), f"the shard cannot be read: {error}")

    def _reader(self, number: int, count: int) -> Iterator[Sample | RecordError]:
        reader = self._readers.get(number)
        if reader is None:
            one: ShardRange = self._ranges[number]
            reader = self._readers[number] = self._read(self._shards[one.shard], one.record(count), one.step)
        return reader
