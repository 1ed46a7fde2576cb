"""The order in which a stream is read, and which records of which shards one consumer reads.

A consumer is one worker of one rank. With at least as many shards as consumers, each shard has one reader. With fewer,
the readers of one shard take every n-th record of it. Either way every record is read once an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.core.errors import OptionError

SHUFFLE_BLOCK = 1024
"""Records that are permuted together."""

INTERLEAVE = 4
"""Shards that a shuffled stream reads round-robin."""

_SHARDS_OF_ALL, _SHARDS_OF_CONSUMER, _BLOCK = range(3)
"""What a random generator is for: no two uses share one."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A file, or whatever is read from its beginning to its end."""

    name: str
    """Its path."""

    count: int | None = None
    """Its records; None where only reading the whole shard would count them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOrder:
    """The order in which a stream is read."""

    shuffle: bool = False
    seed: int | None = None
    """Seed of the order; None draws one from torch's random state for each epoch."""
    shuffle_block: int = SHUFFLE_BLOCK
    interleave: int = INTERLEAVE

    def __post_init__(self) -> None:
        if self.shuffle_block < 1 or self.interleave < 1:
            raise OptionError(
                f"shuffle_block={self.shuffle_block} and interleave={self.interleave} have to be 1 or more"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSpec:
    """Which pass this is, and which consumer's share of it."""

    seed: int = 0
    epoch: int = 0
    rank: int = 0
    ranks: int = 1
    worker: int = 0
    workers: int = 1

    def block_rng(self, block: int) -> np.random.Generator:
        """Return the generator that permutes a block of this consumer."""
        return self._rng(_BLOCK, self.rank, self.worker, block)

    def shards_rng(self, *, of_all_ranks: bool) -> np.random.Generator:
        """Return the generator that permutes shards: those of all ranks, or those of this consumer."""
        return self._rng(_SHARDS_OF_ALL) if of_all_ranks else self._rng(_SHARDS_OF_CONSUMER, self.rank, self.worker)

    def _rng(self, *keys: int) -> np.random.Generator:
        return np.random.default_rng([self.seed & (2**64 - 1), self.epoch, *keys])


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Every `step`-th record of a shard, from record `first`."""

    shard: int
    first: int
    step: int

    def record(self, count: int) -> int:
        """Return the number, within the shard, of the record after `count` records of this range."""
        return self.first + count * self.step


def assign_ranges(order: ReadOrder, shards: int, spec: PassSpec) -> list[ShardRange]:
    """Return what one consumer reads, in its order."""
    ranges = [ShardRange(shard, 0, 1) for shard in range(shards)]
    if order.shuffle and order.seed is not None:
        # Ranks may exchange shards only if all of them know the seed. One drawn from torch's state differs by rank.
        ranges = _permute(ranges, spec.shards_rng(of_all_ranks=True))
    ranges = share_of(share_of(ranges, spec.rank, spec.ranks), spec.worker, spec.workers)
    return _permute(ranges, spec.shards_rng(of_all_ranks=False)) if order.shuffle else ranges


def share_of(ranges: list[ShardRange], consumer: int, consumers: int) -> list[ShardRange]:
    """Return one consumer's share of `ranges`; where there are fewer ranges than consumers, some split one.

    >>> [share_of([ShardRange(0, 0, 1)], consumer, 2) for consumer in range(2)]
    [[ShardRange(shard=0, first=0, step=2)], [ShardRange(shard=0, first=1, step=2)]]
    """
    if len(ranges) >= consumers or not ranges:
        return ranges[consumer::consumers]
    mine = ranges[consumer % len(ranges)]
    sharing = range(consumer % len(ranges), consumers, len(ranges))
    return [ShardRange(mine.shard, mine.record(sharing.index(consumer)), mine.step * len(sharing))]


def _permute(ranges: list[ShardRange], rng: np.random.Generator) -> list[ShardRange]:
    return [ranges[number] for number in rng.permutation(len(ranges))]
