"""The batches of indices that torch's own samplers draw: the same numbers, drawn at the same time, without Python's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from penstock.loader.sampling.indexed_order import (
    BLOCK,
    DrawnIndices,
    SequentialIndices,
    batches,
    blocks_of_rank,
    randperm,
)
from penstock.loader.sampling.rank_sampler import RankSampler, order_of_ranks, share_of
from penstock.loader.sampling.sharding import Share

_ALL = Share()


def index_batches(
    sampler: BatchSampler, *, as_tensors: bool, note: Callable[[Iterable[np.ndarray]], Iterator[np.ndarray]] = iter
) -> Iterator[Any]:
    """Yield the batches of torch's own BatchSampler, as int64 arrays or tensors where it draws from a known sampler.

    Lists from any other sampler, and from a RandomSampler that draws with replacement or other than all indices once.

    Args:
        sampler: of the batches.
        as_tensors: whether they are tensors.
        note: is given the blocks that arrays and tensors are cut from, and yields them.

    >>> sampler = BatchSampler(SequentialSampler(range(5)), 2, False)
    >>> [batch.tolist() for batch in index_batches(sampler, as_tensors=True)]
    [[0, 1], [2, 3], [4]]
    """
    drawn = _blocks(sampler)
    if drawn is None:
        yield from sampler
        return
    size, drops_last, blocks = sampler.batch_size, sampler.drop_last, iter(note(drawn))
    for block in blocks:
        taken = 0
        for batch in _cut(block, size, drops_last=drops_last, as_tensors=as_tensors):
            yield batch
            taken += size
            if sampler.batch_size != size and not drops_last:
                yield from _cut_anew(sampler, np.concatenate([block[taken:], *blocks]), as_tensors=as_tensors)
                return


def _cut(block: np.ndarray, size: int, *, drops_last: bool, as_tensors: bool) -> Iterable[Any]:
    if not as_tensors:
        return batches(iter([block]), size, drops_last=drops_last)
    whole = torch.from_numpy(block)
    # A view by itself costs 2 µs, one of many 0.3 µs, and to cut what is one batch 4 µs.
    views = whole.split(size) if len(block) > size else (whole,)
    return views[:-1] if drops_last and len(block) % size else views


def _cut_anew(sampler: BatchSampler, indices: np.ndarray, *, as_tensors: bool) -> Iterator[Any]:
    """Yield the rest of a pass in batches of the size that the program sets meanwhile: torch asks before each batch.

    A size of 0 ends the pass, as it does there.
    """
    while len(batch := indices[: sampler.batch_size]):
        indices = indices[len(batch) :]
        yield torch.from_numpy(batch) if as_tensors else batch


def _blocks(sampler: BatchSampler) -> Iterable[np.ndarray] | None:
    drawn: Any = sampler.sampler
    size = sampler.batch_size
    if type(drawn) is SequentialSampler:
        count = len(drawn.data_source)
        if 0 < count <= BLOCK:
            return [np.arange(count, dtype=np.int64)]
        return blocks_of_rank(SequentialIndices(count), _ALL, multiple_of=size)
    if type(drawn) in (DistributedSampler, RankSampler):
        order = order_of_ranks(drawn, drawn.epoch, getattr(drawn, "runs", None))
        return blocks_of_rank(order, share_of(drawn), multiple_of=size)
    if type(drawn) is RandomSampler and draws_each_once(drawn):
        return _permuted(drawn, size)
    return None


def draws_each_once(sampler: RandomSampler) -> bool:
    """Return whether it draws each index once."""
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _permuted(drawn: RandomSampler, size: int) -> Iterable[np.ndarray]:
    count = len(drawn.data_source)
    if drawn.generator is not None:
        return _permuted_twice(count, drawn.generator, size)
    private = torch.Generator()
    private.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    order = randperm(count, private)
    if 0 < count <= BLOCK:
        return [order.astype(np.int64)]
    return blocks_of_rank(DrawnIndices(order), _ALL, multiple_of=size)


def _permuted_twice(count: int, generator: torch.Generator, size: int) -> Iterator[np.ndarray]:
    order = randperm(count, generator)
    whole = count - count % size
    yield from blocks_of_rank(DrawnIndices(order[:whole]), _ALL, multiple_of=size)
    randperm(count, generator)  # drawn, and not used, when torch's sampler is asked for one index more
    yield from blocks_of_rank(DrawnIndices(order[whole:]), _ALL, multiple_of=size)
