"""The sampler of a loader that was given none: one that shares out samples, reads whole chunks, or is seeded."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from penstock.data.chunk_shuffle import ChunkShuffle
from penstock.data.source import Source
from penstock.loader.sampling.rank_sampler import RankSampler
from penstock.loader.sampling.sharding import Share, Uneven

_FEWEST_CHUNKS = 3
"""With fewer, a random order of chunks would be hardly random."""


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
