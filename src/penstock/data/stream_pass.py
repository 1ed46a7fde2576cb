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
from penstock.data.stream_order import PassSpec, ReadOrder, Shard, assign_ranges

ReadShard = Callable[[Shard, int, int], Iterator[Sample | RecordError]]
"""`Stream.read`: the records of a shard from one number, with a step."""


@dataclass
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
        return {**vars(self), "open": [*self.open]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Position:
        """Return the position that `to_state` has described."""
        return cls(**{**state, "open": [(int(number), int(count)) for number, count in state["open"]]})


@dataclass(slots=True)
class _OpenRange:
    """A range that is being read."""

    number: int
    count: int = 0
    """Records of it that were read."""
    reader: Iterator[Sample | RecordError] | None = None


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
        self.splits = [[*split] for split in splits]
        self._read = read
        self._shards = shards
        self._order = order
        self._ranges = assign_ranges(order, len(shards), spec)
        self._position = position or Position()
        """Where the block begins, of a shuffled pass."""
        self._next_block = self._position
        self._block: list[Sample | RecordError] | None = None
        self._next_range = self._position.next_range
        self._open = self._opened()

    @property
    def position(self) -> Position:
        """Where the pass is."""
        return self._position if self._order.shuffle else self._reached(turn=0)

    def __iter__(self) -> RecordPass:
        return self

    def __next__(self) -> Sample | RecordError:
        while True:
            record = self._next_in_block() if self._order.shuffle else self._next_in_order()
            if not self.splits or self._is_in_share():
                return record

    def close(self) -> None:
        """Close the shards that are open."""
        for one in self._open:
            close = getattr(one.reader, "close", None)
            one.reader = None
            if close is not None:
                close()

    def _opened(self) -> list[_OpenRange]:
        return [_OpenRange(number, count) for number, count in self._position.open]

    def _reached(self, turn: int) -> Position:
        return Position(next_range=self._next_range, open=[(one.number, one.count) for one in self._open], turn=turn)

    def _is_in_share(self) -> bool:
        """Count a record, and return whether it is this consumer's in every split."""
        for split in self.splits:
            turn, consumers, count = split
            split[2] += 1
            if count % consumers != turn:
                return False
        return True

    def _next_in_order(self) -> Sample | RecordError:
        while self._open or self._open_next():
            record = self._next_of(self._open[0])
            if record is not None:
                return record
            self._open.clear()
        raise StopIteration

    def _next_in_block(self) -> Sample | RecordError:
        while self._block is None or self._position.returned >= len(self._block):
            if self._block is not None:
                self._next_block.block = self._position.block + 1
                self._position, self._block = self._next_block, None
            try:
                self._block = self._read_block()
            except KeyboardInterrupt:  # it is read again
                self._open, self._next_range = self._opened(), self._position.next_range
                raise
            if not self._block:
                raise StopIteration
        record = self._block[self._position.returned]
        self._position.returned += 1
        return record

    def _read_block(self) -> list[Sample | RecordError]:
        """Return the block that begins at `position`, and set `_next_block` to where the one after it begins."""
        block: list[Sample | RecordError] = []
        turn = self._position.turn
        while len(block) < self._order.shuffle_block:
            while len(self._open) < self._order.interleave and self._open_next():
                pass
            if not self._open:
                break
            turn %= len(self._open)
            record = self._next_of(self._open[turn])
            if record is None:
                self._open.pop(turn)
                continue
            block.append(record)
            turn += 1
        self._next_block = self._reached(turn)
        permutation = self.spec.block_rng(self._position.block).permutation(len(block))
        return [block[index] for index in permutation]

    def _open_next(self) -> bool:
        """Begin the next range; return False if there is none."""
        if self._next_range >= len(self._ranges):
            return False
        self._open.append(_OpenRange(self._next_range))
        self._next_range += 1
        return True

    def _next_of(self, one: _OpenRange) -> Sample | RecordError | None:
        """Return the next record of a range; None at its end."""
        try:
            if one.reader is None:
                wanted = self._ranges[one.number]
                one.reader = self._read(self._shards[wanted.shard], wanted.record(one.count), wanted.step)
            record = next(one.reader, None)
        except SourceError as error:  # the rest of this shard cannot be read; the others can
            record, one.reader = self._shard_error(error, one), iter(())
        except KeyboardInterrupt:  # a generator that raises is over
            one.reader = None
            raise
        if record is not None:
            one.count += 1
        return record

    def _shard_error(self, error: SourceError, one: _OpenRange) -> RecordError:
        if isinstance(error, RecordError):
            return error
        wanted = self._ranges[one.number]
        name = self._shards[wanted.shard].name
        return RecordError(name, -1, wanted.record(one.count), f"the shard cannot be read: {error}")
