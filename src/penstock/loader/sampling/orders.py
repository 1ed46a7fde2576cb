"""Orders: which indices an epoch has, and how to have the same ones again from any position.

A loader's sampler draws the indices of an epoch from a random state or a seed. What is drawn is data, for each kind of
sampler:

    SequentialOrder      SequentialSampler     nothing
    RandomOrder          RandomSampler         the seed that it drew, or the state of its generator
    DistributedOrder     DistributedSampler    the seed and the epoch; the order is shared out over ranks
    ChunkShuffleOrder    ChunkShuffle          the seed and the epoch that it drew, and what it was made for
    UnknownOrder         any other             its own state and how much was drawn since, if it keeps one; else
                                               torch's random state: what was handed out is drawn again and discarded

No sample is made again.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from penstock.data.chunk_shuffle import ChunkShuffle
from penstock.loader.sampling.indexed_order import DrawnIndices, IndexedOrder, SequentialIndices, randperm
from penstock.loader.sampling.own_sampler import RankSampler, order_of_ranks, share_of
from penstock.loader.sampling.sharding import Share
from penstock.loader.sampling.unknown_order import OrderState, UnknownOrder


class KnownOrder(Protocol):
    """One kind of sampler of which it is known what its indices depend on. The thread that iterates calls all methods.

    An epoch is `draw`, and `indexed` of what that returned, here or in another process; then `end`, when indices are
    asked for beyond the last. A checkpoint between two epochs has `end_state`, for `begin_after`.
    """

    share: Share

    @property
    def draws_beyond(self) -> bool:
        """Whether `end` draws anything."""
        ...

    def traits(self) -> dict[str, Any]:
        """Return what must be equal in the loader that resumes an epoch, beside the type of the sampler."""
        ...

    def draw(self) -> OrderState:
        """Draw what an epoch's order depends on, as the sampler does when it is asked for its first index."""
        ...

    def indexed(self, state: OrderState) -> IndexedOrder:
        """Return the order of all ranks; a generator of the sampler's own is then as after drawing it."""
        ...

    def end(self) -> None:
        """Draw what the sampler draws when it is asked for one index more than it has."""
        ...

    def end_state(self) -> OrderState:
        """Return the state from which the next epoch will be drawn, as far as the sampler holds it."""
        ...

    def begin_after(self, end: OrderState) -> None:
        """Prepare the sampler for the epoch after the one whose `end_state` this is."""
        ...


Order = KnownOrder | UnknownOrder


class SequentialOrder:
    """One index after the other; what the other known orders have in common."""

    share = Share()

    @property
    def draws_beyond(self) -> bool:
        """False."""
        return False

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def traits(self) -> dict[str, Any]:
        """Return none."""
        return {}

    def draw(self) -> OrderState:
        """Return nothing."""
        return {}

    def indexed(self, state: OrderState) -> IndexedOrder:
        """Return all of them."""
        return SequentialIndices(len(self._sampler))

    def end(self) -> None:
        """Draw nothing."""

    def end_state(self) -> OrderState:
        """Return nothing."""
        return {}

    def begin_after(self, end: OrderState) -> None:
        """The sampler keeps no state."""


class RandomOrder(SequentialOrder):
    """A permutation from torch's random state, or from a generator."""

    _sampler: RandomSampler

    @property
    def draws_beyond(self) -> bool:
        """Whether it has a generator, from which it draws another permutation at the end."""
        return self._sampler.generator is not None

    def traits(self) -> dict[str, Any]:
        """Return what is drawn, and whether from a generator of its own."""
        return {"count": self._sampler.num_samples, "generator": self._sampler.generator is not None}

    def draw(self) -> OrderState:
        """Return the seed that the sampler draws for itself, or the state of the generator it was given."""
        if self._sampler.generator is not None:
            return {"generator": self._sampler.generator.get_state()}
        return {"seed": int(torch.empty((), dtype=torch.int64).random_().item())}

    def indexed(self, state: OrderState) -> IndexedOrder:
        """Return the permutation."""
        generator = self._sampler.generator
        if generator is None:
            generator = torch.Generator().manual_seed(state["seed"])
        else:
            generator.set_state(state["generator"])
        return DrawnIndices(randperm(len(self._sampler.data_source), generator))

    def end(self) -> None:
        """Draw a permutation that is not used."""
        if self._sampler.generator is not None:
            randperm(len(self._sampler.data_source), self._sampler.generator)

    def end_state(self) -> OrderState:
        """Return the state of a generator of its own."""
        generator = self._sampler.generator
        return {} if generator is None else {"generator": generator.get_state()}

    def begin_after(self, end: OrderState) -> None:
        """Give a generator of its own the state that it had."""
        if self._sampler.generator is not None and "generator" in end:
            self._sampler.generator.set_state(end["generator"])


class DistributedOrder(SequentialOrder):
    """An order that a seed and an epoch make, shared out over ranks."""

    _sampler: DistributedSampler[Any]

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        super().__init__(sampler)
        self._runs: ChunkShuffle | None = getattr(sampler, "runs", None)
        self.share = share_of(sampler)

    def traits(self) -> dict[str, Any]:
        """Return the seed, whether it is used, and how."""
        order = self._sampler
        is_computed = isinstance(order, RankSampler) and order.is_computed
        return {"seed": order.seed, "shuffle": order.shuffle, "runs": self._runs is not None, "computed": is_computed}

    def draw(self) -> OrderState:
        """Return the seed and the epoch, and what an order by runs was made for."""
        state: OrderState = {"seed": self._sampler.seed, "epoch": self._sampler.epoch}
        return state if self._runs is None else {**state, "runs": self._runs.purpose}

    def indexed(self, state: OrderState) -> IndexedOrder:
        """Return the order of all ranks."""
        self._sampler.epoch = state["epoch"]
        runs = self._runs.made_for(state["runs"]) if self._runs is not None and "runs" in state else None
        return order_of_ranks(self._sampler, state["epoch"], runs)


class ChunkShuffleOrder(SequentialOrder):
    """An order by runs."""

    _sampler: ChunkShuffle

    def draw(self) -> OrderState:
        """Return the seed and the epoch that were drawn, and the batches and workers that the order was made for."""
        seed, epoch = self._sampler.draw()
        return {**self._sampler.next_pass(), "seed": seed, "epoch": epoch, "runs": self._sampler.purpose}

    def indexed(self, state: OrderState) -> IndexedOrder:
        """Return the order."""
        self._sampler.set_next_pass({**state, "epoch": state["epoch"] + 1})
        return self._sampler.made_for(state["runs"]).order(state["seed"], state["epoch"])

    def end_state(self) -> OrderState:
        """Return the epoch that comes next, and the state of a generator of its own."""
        return self._sampler.next_pass()

    def begin_after(self, end: OrderState) -> None:
        """Have that epoch come next."""
        self._sampler.set_next_pass(end)


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
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
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
