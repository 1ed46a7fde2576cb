"""Orders: which indices an epoch has, and how to draw the same ones again from any position.

A loader's sampler draws the indices of an epoch from a random state or a seed. An order knows, for one kind of
sampler, what has to be remembered at the beginning of the epoch so that another process can draw the same indices:

    SequentialOrder      SequentialSampler     nothing
    RandomOrder          RandomSampler         the seed that it drew, or the state of its generator
    DistributedOrder     DistributedSampler    the seed and the epoch; the order is shared out over ranks
    ChunkShuffleOrder    ChunkShuffle          the seed and the epoch that it drew, and what it was made for
    UnknownOrder         any other             its own state and how much was drawn since, if it keeps one; else
                                               torch's random state: what was handed out is drawn again and discarded

Drawing an index costs some ten nanoseconds. No sample is made again.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from penstock.data.chunks.chunk_shuffle import ChunkShuffle
from penstock.loader.sampling.index_batches import draws_each_once
from penstock.loader.sampling.indexed_order import (
    DrawnIndices,
    IndexedOrder,
    SequentialIndices,
    blocks_of_rank,
    numbers,
    randperm,
)
from penstock.loader.sampling.order import Order, OrderState, with_first_drawn
from penstock.loader.sampling.rank_sampler import RankSampler, order_of_ranks, share_of
from penstock.loader.sampling.sharding import Share
from penstock.loader.sampling.unknown_order import UnknownOrder


class SequentialOrder:
    """One index after the other."""

    share = Share()
    is_known = True

    def __init__(self, sampler: SequentialSampler) -> None:
        self._sampler = sampler

    def traits(self) -> dict[str, Any]:
        """Return none."""
        return {}

    def begin(self) -> None:
        """Any iterator of the sampler will do."""

    def note_state(self) -> None:
        """The order does not depend on it."""

    def note_drawn(self, count: int) -> None:
        """The order does not depend on it."""

    def capture(self, taken: int, drawn: int | None) -> OrderState:
        """Return nothing."""
        return {}

    def forget(self, taken: int) -> None:
        """There is nothing to forget."""

    def indexed(self, state: OrderState) -> IndexedOrder | None:
        """Return all of them."""
        return SequentialIndices(len(self._sampler))

    def replay(self, state: OrderState, position: int, digest: int | None = None) -> Iterator[int]:
        """Return the indices from `position` on."""
        order = self.indexed(state)
        assert order is not None
        return numbers(blocks_of_rank(order, Share(), position=position))

    def end_state(self) -> OrderState:
        """Return nothing."""
        return {}

    def begin_after(self, end: OrderState) -> None:
        """The sampler keeps no state."""


class RandomOrder(SequentialOrder):
    """A permutation from torch's random state, or from a generator."""

    def __init__(self, sampler: RandomSampler) -> None:
        self._random = sampler
        self._state: OrderState = {}
        self._before: torch.Tensor | None = None
        """Torch's random state before the permutation, until somebody wants the seed that was drawn from it."""

    def traits(self) -> dict[str, Any]:
        """Return what is drawn, and whether from a generator of its own."""
        drawn = {"replacement": self._random.replacement, "count": self._random.num_samples}
        return {**drawn, "generator": self._random.generator is not None}

    def note_state(self) -> None:
        """Note the random state that the permutation is about to be drawn from."""
        generator = self._random.generator
        self._state = {} if generator is None else {"generator": generator.get_state()}
        self._before = torch.get_rng_state() if generator is None else None

    def capture(self, taken: int, drawn: int | None) -> OrderState:
        """Return the seed that the sampler has drawn for itself, or the state of the generator it was given."""
        if self._before is not None:
            generator = torch.Generator()
            generator.set_state(self._before)
            self._state = {"seed": int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())}
            self._before = None
        return {**self._state}

    def indexed(self, state: OrderState) -> IndexedOrder | None:
        """Return the permutation; None where the sampler draws with replacement, or from a generator of its own."""
        if "seed" not in state or not draws_each_once(self._random):
            return None
        generator = torch.Generator().manual_seed(state["seed"])
        return DrawnIndices(randperm(len(self._random.data_source), generator))

    def replay(self, state: OrderState, position: int, digest: int | None = None) -> Iterator[int]:
        """Return the indices from `position` on; a generator of its own is then where it was at the first time."""
        sampler = self._random
        if "generator" in state and sampler.generator is not None:
            generator = sampler.generator
            generator.set_state(state["generator"])
        else:
            generator = torch.Generator().manual_seed(state["seed"])
        if draws_each_once(sampler):
            return self._permuted(randperm(len(sampler.data_source), generator), position, generator)
        same = RandomSampler(sampler.data_source, sampler.replacement, sampler._num_samples, generator)
        return with_first_drawn(itertools.islice(same, position, None))

    def _permuted(self, order: np.ndarray, position: int, generator: torch.Generator) -> Iterator[int]:
        yield from numbers(blocks_of_rank(DrawnIndices(order), Share(), position=position))
        randperm(len(order), generator)  # drawn, and not used, when torch's sampler is asked for one index more

    def end_state(self) -> OrderState:
        """Return the state of a generator of its own."""
        generator = self._random.generator
        return {} if generator is None else {"generator": generator.get_state()}

    def begin_after(self, end: OrderState) -> None:
        """Give a generator of its own the state that it had."""
        if self._random.generator is not None and "generator" in end:
            self._random.generator.set_state(end["generator"])


class DistributedOrder(SequentialOrder):
    """An order that a seed and an epoch make, shared out over ranks."""

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self._ranks = sampler
        self._runs: ChunkShuffle | None = getattr(sampler, "runs", None)
        self.share = share_of(sampler)

    def traits(self) -> dict[str, Any]:
        """Return the seed, whether it is used, and how."""
        order = self._ranks
        is_computed = isinstance(order, RankSampler) and order.is_computed
        return {"seed": order.seed, "shuffle": order.shuffle, "runs": self._runs is not None, "computed": is_computed}

    def capture(self, taken: int, drawn: int | None) -> OrderState:
        """Return the seed and the epoch, and what an order by runs was made for."""
        state: OrderState = {"seed": self._ranks.seed, "epoch": self._ranks.epoch}
        return state if self._runs is None else {**state, "runs": self._runs.purpose}

    def indexed(self, state: OrderState) -> IndexedOrder:
        """Return the order of all ranks."""
        self._ranks.epoch = state["epoch"]
        runs = self._runs.made_for(state["runs"]) if self._runs is not None and "runs" in state else None
        return order_of_ranks(self._ranks, state["epoch"], runs)


class ChunkShuffleOrder(SequentialOrder):
    """An order by runs."""

    def __init__(self, sampler: ChunkShuffle) -> None:
        self._runs = sampler

    def indexed(self, state: OrderState) -> None:
        """Return None: its position is kept by `replay`."""

    def capture(self, taken: int, drawn: int | None) -> OrderState:
        """Return the seed and the epoch that were drawn, and the batches and shards that the order was made for."""
        seed, epoch = self._runs.as_drawn()
        return {**self._runs.next_pass(), "seed": seed, "epoch": epoch, "runs": self._runs.purpose}

    def replay(self, state: OrderState, position: int, digest: int | None = None) -> Iterator[int]:
        """Return the indices from `position` on."""
        self._runs.set_next_pass({**state, "epoch": state["epoch"] + 1})
        return self._runs.made_for(state["runs"]).drawn(state["seed"], state["epoch"], position)

    def end_state(self) -> OrderState:
        """Return the epoch that comes next, and the state of a generator of its own."""
        return self._runs.next_pass()

    def begin_after(self, end: OrderState) -> None:
        """Have that epoch come next."""
        self._runs.set_next_pass(end)


def order_for(sampler: Any, *, snapshot_every: int) -> Order:
    """Return what is to be known of the sampler that a loader's batches (or single indices) are drawn from.

    Args:
        sampler: of indices or batches.
        snapshot_every: after how many batches that are drawn ahead of the loop a sampler is asked for its state.
    """
    is_batched = plain_batches(sampler) is not None
    sampler = drawn_from(sampler)
    if type(sampler) is SequentialSampler:
        return SequentialOrder(sampler)
    if type(sampler) is RandomSampler:
        return RandomOrder(sampler)
    if type(sampler) in (DistributedSampler, RankSampler):
        return DistributedOrder(sampler)
    if type(sampler) is ChunkShuffle:
        return ChunkShuffleOrder(sampler)
    return UnknownOrder(sampler, snapshot_every, is_batched=is_batched)


def drawn_from(sampler: Any) -> Any:
    """Return what torch's own BatchSampler cuts into batches; anything else as it is."""
    cut = plain_batches(sampler)
    return sampler if cut is None else cut[0]


def plain_batches(sampler: Any) -> tuple[Any, int, bool] | None:
    """Return what torch's own BatchSampler cuts into batches, how large, and whether the rest is dropped."""
    if type(sampler) is not BatchSampler:
        return None
    return sampler.sampler, sampler.batch_size, sampler.drop_last


def has_lazy_iterator(sampler: Any) -> bool:
    """Return whether it changes nothing to ask a sampler for an iterator of which nothing is taken."""
    return type(sampler) is BatchSampler or inspect.isgeneratorfunction(type(sampler).__iter__)
