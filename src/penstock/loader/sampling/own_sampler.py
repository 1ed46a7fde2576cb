"""The sampler of a loader that was given none, where torch's will not do: to share out samples, read whole chunks, or
with a seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from penstock.data.chunk_shuffle import ChunkShuffle
from penstock.data.source import Source
from penstock.loader.sampling.indexed_order import (
    DrawnIndices,
    IndexedOrder,
    SequentialIndices,
    blocks_of_rank,
    numbers,
    randperm,
)
from penstock.loader.sampling.seeded_permutation import SeededPermutation
from penstock.loader.sampling.sharding import Share, Uneven

_FEWEST_CHUNKS = 3
"""With fewer, a random order of chunks would be hardly random."""

_MOST_DRAWN = 1 << 21
"""More samples are not drawn into memory where the order may be computed: these take 8 MiB and some 20 ms."""


def own_sampler(
    dataset: Any,
    *,
    batch_size: int | None,
    shuffle: bool,
    workers: int,
    generator: torch.Generator | None,
    seed: int | None,
    rank: int,
    world_size: int,
    is_distributed: bool,
    uneven: Uneven,
) -> ChunkShuffle | RankSampler | None:
    """Return the sampler for these arguments of a DataLoader; None where torch makes its own.

    Args:
        dataset: map-style.
        batch_size: samples in a batch; None without batching.
        shuffle: whether the order is random.
        workers: of one rank.
        generator: of the order, where there is no seed.
        seed: of the order, the same on all ranks.
        rank: which of the ranks this is.
        world_size: how many ranks there are.
        is_distributed: whether samples are shared out over ranks.
        uneven: what happens where they cannot be shared out evenly.
    """
    chunks = _chunk_shuffle(dataset, batch_size, workers * world_size, generator) if shuffle else None
    if not is_distributed and not (seed is not None and shuffle):
        return chunks
    # Whole batches are dealt out where chunks are read, so that a rank reads chunks of its own.
    block = (batch_size or 1) if chunks is not None else 1
    share = Share(rank=rank, world=world_size, block=block, uneven=uneven)
    return RankSampler(dataset, share, shuffle=shuffle, seed=seed, runs=chunks)


def reads_chunks(sampler: Any) -> bool:
    """Return whether a sampler made here deals chunks to workers by torch's round robin."""
    return isinstance(sampler, ChunkShuffle) or (isinstance(sampler, RankSampler) and sampler.runs is not None)


def draws_unnoticed(sampler: Any) -> bool:
    """Return whether nobody can tell how far ahead of the loop a sampler (of batches or indices) is asked.

    These draw from a random state of their own, unless the program gave one.
    """
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    is_known = type(sampler) in (SequentialSampler, RandomSampler, DistributedSampler, RankSampler)
    return is_known and getattr(sampler, "generator", None) is None


def _chunk_shuffle(
    dataset: Any, batch_size: int | None, lanes: int, generator: torch.Generator | None
) -> ChunkShuffle | None:
    """Return a random order in which each worker reads chunks of its own; None where the data has no chunks."""
    starts = dataset.chunk_starts if isinstance(dataset, Source) else None
    if starts is None or len(starts) < _FEWEST_CHUNKS:
        return None
    return ChunkShuffle(starts, batch_size=batch_size or 1, lanes=max(1, lanes), generator=generator)


class RankSampler(DistributedSampler[Any]):
    """What `DataLoader(..., distributed=True)` or `seed=` draws from: torch's DistributedSampler, bit for bit.

    Besides, it counts epochs by itself, has the ends that `uneven` says, and deals whole runs. With a seed, the order
    of more than two million samples is not torch's: it is computed by index.

    Args:
        dataset: has a length.
        share: whose part.
        shuffle: in an order that the seed and the epoch make.
        seed: of the order, the same on all ranks; None for 0, and torch's order of any length.
        runs: an order by runs, in place of a permutation of single samples.

    >>> list(RankSampler(range(5), Share(rank=1, world=2), shuffle=False))
    [1, 3, 0]
    """

    def __init__(
        self, dataset: Any, share: Share, *, shuffle: bool, seed: int | None = None, runs: ChunkShuffle | None = None
    ) -> None:
        super().__init__(dataset, share.world, share.rank, shuffle, seed or 0, share.uneven == "drop")
        self.share = share
        self.is_torchs = seed is None
        self.runs = runs
        self._set_by_program: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`; without it the loader counts."""
        self.epoch = self._set_by_program = epoch

    @property
    def epoch_set(self) -> int | None:
        """What `set_epoch` was called with since the last pass began; None if it was not."""
        return self._set_by_program

    def begin(self, epoch: int) -> int:
        """Begin the pass of `epoch`, or of the one that `set_epoch` has said; return which it is."""
        self.epoch = epoch if self._set_by_program is None else self._set_by_program
        self._set_by_program = None
        return self.epoch

    def __iter__(self) -> Iterator[int]:
        return numbers(blocks_of_rank(order_of_ranks(self, self.epoch, self.runs), self.share))

    @property
    def is_computed(self) -> bool:
        """Whether the order is computed by index."""
        is_random = self.shuffle and self.runs is None
        return is_random and not self.is_torchs and len(self.dataset) > _MOST_DRAWN  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.share.size(len(self.dataset))  # type: ignore[arg-type]


def order_of_ranks(sampler: DistributedSampler[Any], epoch: int, runs: ChunkShuffle | None) -> IndexedOrder:
    """Return the order of all ranks in an epoch: a permutation, or by runs; of torch's sampler, too."""
    count = len(sampler.dataset)  # type: ignore[arg-type]
    if not sampler.shuffle:
        return SequentialIndices(count)
    if runs is not None:
        return runs.order(sampler.seed, epoch)
    if isinstance(sampler, RankSampler) and sampler.is_computed:
        return SeededPermutation(count, seed=sampler.seed, epoch=epoch)
    return DrawnIndices(randperm(count, torch.Generator().manual_seed(sampler.seed + epoch)))


def share_of(sampler: DistributedSampler[Any]) -> Share:
    """Return which part of that order is this rank's; of torch's sampler, too."""
    if isinstance(sampler, RankSampler):
        return sampler.share
    return Share(rank=sampler.rank, world=sampler.num_replicas, uneven="drop" if sampler.drop_last else "pad")
