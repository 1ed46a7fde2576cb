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

import contextlib
import copy
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from penstock.data.chunk_shuffle import ChunkShuffle
from penstock.distributed.rank import rank_and_world_size
from penstock.loader.sampling.sharding import RankSampler, Share, Uneven, numbers, order_of_ranks
from penstock.loader.workers.stateful import is_stateful

OrderState = dict[str, Any]
"""How the indices of an epoch were drawn, as plain values."""


class Order(Protocol):
    """One kind of sampler, during an epoch. All methods are called by the thread that iterates.

    In an epoch: `begin`, `note_state` before the first index, `note_drawn` after each batch, `capture` and `end_state`
    for a checkpoint at any time, `foresee` for one before the first index. To resume: `replay` in the place of `begin`,
    or `begin_after` before it.
    """

    share: Share

    def traits(self) -> dict[str, Any]:
        """Return what must be equal in the loader that resumes an epoch, beside the type of the sampler."""
        ...

    def begin(self) -> Iterator[Any] | None:
        """Begin an epoch; return the iterator to use, or None where any fresh one will do."""
        ...

    def note_state(self) -> None:
        """Record the random state from which the sampler is about to draw its first index."""
        ...

    def note_drawn(self, count: int) -> None:
        """Record that `count` indices of this epoch have been drawn in total."""
        ...

    def capture(self, taken: int, drawn: int) -> OrderState:
        """Return what `replay` needs when `taken` of the `drawn` indices of this epoch have been handed out."""
        ...

    def foresee(self, begin: torch.Tensor | None, first: torch.Tensor) -> OrderState | None:
        """Return what `replay` needs if the epoch is drawn from torch's own random state; None if it is not.

        Args:
            begin: the random state with which the sampler's iterator will be made; None if it has been made.
            first: the random state with which its first index will be drawn.
        """
        ...

    def forget(self, taken: int) -> None:
        """Forget what only a state with fewer indices than `taken` would need; called after every few batches."""
        ...

    def replay(self, state: OrderState, position: int) -> Iterable[Any]:
        """Return the indices of the same epoch from `position` on."""
        ...

    def end_state(self) -> OrderState:
        """Return the state from which the next epoch will be drawn, as far as the sampler holds it."""
        ...

    def begin_after(self, end: OrderState) -> None:
        """Prepare the sampler for the epoch after the one whose `end_state` this is."""
        ...


class SequentialOrder:
    """One index after the other."""

    share = Share()

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

    def capture(self, taken: int, drawn: int) -> OrderState:
        """Return nothing."""
        return {}

    def forget(self, taken: int) -> None:
        """There is nothing to forget."""

    def foresee(self, begin: torch.Tensor | None, first: torch.Tensor) -> OrderState | None:
        """Return None: the order does not depend on it."""
        return None

    def replay(self, state: OrderState, position: int) -> Iterable[int]:
        """Return the indices from `position` on."""
        return range(len(self._sampler))[position:]

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

    def traits(self) -> dict[str, Any]:
        """Return what is drawn, and whether from a generator of its own."""
        drawn = {"replacement": self._random.replacement, "count": self._random.num_samples}
        return {**drawn, "generator": self._random.generator is not None}

    def note_state(self) -> None:
        """Note the random state that the permutation is about to be drawn from."""
        generator = self._random.generator
        if generator is not None:
            self._state = {"generator": generator.get_state()}
        else:
            self._state = {"seed": seed_drawn_from(torch.get_rng_state())[0]}

    def capture(self, taken: int, drawn: int) -> OrderState:
        """Return the seed that the sampler has drawn for itself, or the state of the generator it was given."""
        return {**self._state}

    def foresee(self, begin: torch.Tensor | None, first: torch.Tensor) -> OrderState | None:
        """Return the seed that the sampler will draw, if it has no generator."""
        return {"seed": seed_drawn_from(first)[0]} if self._random.generator is None else None

    def replay(self, state: OrderState, position: int) -> Iterator[int]:
        """Return the indices from `position` on; a generator of its own is then where it was at the first time."""
        sampler = self._random
        if "generator" in state and sampler.generator is not None:
            generator = sampler.generator
            generator.set_state(state["generator"])
        else:
            generator = torch.Generator()
            generator.manual_seed(state["seed"])
        same = RandomSampler(sampler.data_source, sampler.replacement, sampler._num_samples, generator)
        return _with_first_drawn(itertools.islice(same, position, None))

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
        uneven: Uneven = "drop" if sampler.drop_last else "pad"
        self.share = getattr(sampler, "share", Share(rank=sampler.rank, world=sampler.num_replicas, uneven=uneven))

    def traits(self) -> dict[str, Any]:
        """Return the seed, and whether it is used."""
        return {"seed": self._ranks.seed, "shuffle": self._ranks.shuffle, "runs": self._runs is not None}

    def capture(self, taken: int, drawn: int) -> OrderState:
        """Return the seed and the epoch, and what an order by runs was made for."""
        state: OrderState = {"seed": self._ranks.seed, "epoch": self._ranks.epoch}
        return state if self._runs is None else {**state, "runs": self._runs.purpose}

    def replay(self, state: OrderState, position: int) -> Iterator[int]:
        """Return the indices of all ranks from `position` on."""
        self._ranks.epoch = state["epoch"]
        runs = self._runs.made_for(state["runs"]) if self._runs is not None and "runs" in state else None
        return numbers(order_of_ranks(self._ranks, state["epoch"], runs)[position:])


class ChunkShuffleOrder(SequentialOrder):
    """An order by runs."""

    def __init__(self, sampler: ChunkShuffle) -> None:
        self._runs = sampler

    def capture(self, taken: int, drawn: int) -> OrderState:
        """Return the seed and the epoch that were drawn, and the batches and shards that the order was made for."""
        seed, epoch = self._runs.as_drawn()
        return {**self._runs.next_pass(), "seed": seed, "epoch": epoch, "runs": self._runs.purpose}

    def replay(self, state: OrderState, position: int) -> Iterator[int]:
        """Return the indices from `position` on."""
        self._runs.set_next_pass({**state, "epoch": state["epoch"] + 1})
        indices = self._runs.made_for(state["runs"]).drawn(state["seed"], state["epoch"])
        return itertools.islice(indices, position, None)

    def end_state(self) -> OrderState:
        """Return the epoch that comes next, and the state of a generator of its own."""
        return self._runs.next_pass()

    def begin_after(self, end: OrderState) -> None:
        """Have that epoch come next."""
        self._runs.set_next_pass(end)


class UnknownOrder:
    """Any other sampler, of indices or of batches.

    A sampler that keeps a state, or whose iterator does (as torchdata's), is asked for it: where batches are drawn
    ahead of the loop, after every few of them (`every`); else when a state is wanted. The indices of any other are
    repeated by restoring torch's random state and the sampler's epoch.
    """

    share = Share()

    def __init__(self, sampler: Any, every: int) -> None:
        self._sampler = sampler
        self._every = max(1, every)
        self._batches = 0
        self._noted: OrderState = {}
        self._states: deque[tuple[int, OrderState]] = deque()
        self._iterator: Iterator[Any] = iter(())
        self._is_after_end = False
        self._first: OrderState = {}
        """The state that the epoch began with. One that stays the same says nothing of the position."""

    def traits(self) -> dict[str, Any]:
        """Return how many indices there are, and among how many ranks: it may share them out by itself."""
        try:
            count = len(self._sampler)
        except (TypeError, NotImplementedError):
            count = None
        return {"count": count, "ranks": rank_and_world_size()[1]}

    def begin(self) -> Iterator[Any]:
        """Begin to iterate; note the state that it begins with."""
        self._noted = {"begin": torch.get_rng_state()}
        generator = self._generator()
        if generator is not None:
            self._noted["generator"] = generator.get_state()
        if self._has_epochs():
            self._noted["epoch"] = self._sampler.epoch
        before = copy.deepcopy(_state_of(self._sampler))
        self._iterator = iter(self._sampler)
        self._keep({"sampler": before, "iterator": copy.deepcopy(_state_of(self._iterator))}, 0)
        return self._after_end() if self._is_after_end else self._iterator

    def _after_end(self) -> Iterator[Any]:
        """Yield the indices after an end was restored; a sampler that says there are no more is asked once again."""
        self._is_after_end = False
        nothing = object()
        first = next(self._iterator, nothing)
        if first is nothing:
            self._iterator = iter(self._sampler)
        else:
            yield first
        yield from self._iterator

    def end_state(self) -> OrderState:
        """Return the states of the sampler, of its last iterator and of its generator."""
        generator = self._generator()
        states = {
            "sampler": _state_of(self._sampler),
            "iterator": _state_of(self._iterator),
            "generator": generator.get_state() if generator else None,
            "epoch": self._sampler.epoch if self._has_epochs() else None,
        }
        return {name: state for name, state in states.items() if state is not None}

    def begin_after(self, end: OrderState) -> None:
        """Give the sampler, and its generator, the states that they had.

        An iterator with a state may have changed its sampler when it was made, and restores that with its own state. So
        one is made for that alone; the sampler's own state comes last.
        """
        if "iterator" in end:
            iter(self._sampler).load_state_dict(end["iterator"])
        generator = self._generator()
        if generator is not None and "generator" in end:
            generator.set_state(end["generator"])
        if "epoch" in end and self._has_epochs():
            self._sampler.set_epoch(end["epoch"])
        if "sampler" in end:
            self._sampler.load_state_dict(end["sampler"])
            self._is_after_end = True

    def note_state(self) -> None:
        """Note torch's random state again: most samplers draw when they are asked for their first index."""
        self._noted["first"] = torch.get_rng_state()

    def note_drawn(self, count: int) -> None:
        """Record the sampler's state after every few batches that are drawn ahead."""
        self._batches += 1
        if self._states and self._batches % self._every == 0:
            self._keep_state(count, copy.deepcopy(self._now()))

    def _now(self) -> OrderState:
        return {"sampler": _state_of(self._sampler), "iterator": _state_of(self._iterator)}

    def _keep_state(self, at: int, state: OrderState) -> None:
        if not is_same_state(state, self._first):
            self._states.append((at, state))

    def capture(self, taken: int, drawn: int) -> OrderState:
        """Return the last state from which nothing is missing and when it was taken; or else what was noted."""
        if not self._states:
            return self._noted
        if taken == drawn and self._states[-1][0] < drawn:
            self._keep_state(drawn, self._now())
        self.forget(taken)
        at, state = self._states[0]
        return {**state, "at": at}

    def forget(self, taken: int) -> None:
        """Forget the states before the last one from which nothing is missing."""
        while len(self._states) > 1 and self._states[1][0] <= taken:
            self._states.popleft()

    def foresee(self, begin: torch.Tensor | None, first: torch.Tensor) -> OrderState | None:
        """Return what the sampler's iterator was made from, or torch's random states if it will draw from these."""
        if isinstance(self._sampler, Sequence):
            return None
        if begin is None:
            return self.capture(0, 0) if self._states else {**self._noted, "first": first}
        if is_stateful(self._sampler) or self._generator() is not None:
            return None
        return {"begin": begin, "first": first}  # its epoch is in `end_state`, and a program may then set another

    def replay(self, state: OrderState, position: int) -> Iterator[Any]:
        """Return what comes from `position` on."""
        self._is_after_end = False
        return self._from_state(state, position) if "at" in state else self._replayed(state, position)

    def _from_state(self, state: OrderState, position: int) -> Iterator[Any]:
        if state["sampler"] is not None:
            self._sampler.load_state_dict(state["sampler"])
        count = self.traits()["count"]
        if state["iterator"] is None and count is not None and state["at"] >= count:
            self._is_after_end = True  # the sampler may be in its next epoch already
            self._keep({"sampler": state["sampler"], "iterator": None}, state["at"])
            return iter(())
        self._iterator = iter(self._sampler)
        if state["iterator"] is not None:
            self._iterator.load_state_dict(state["iterator"])  # type: ignore[attr-defined]
        self._keep({"sampler": state["sampler"], "iterator": state["iterator"]}, state["at"])
        # Before its first index a sampler may still say that it is at the end of its last epoch.
        indices = self._after_end() if state["at"] == 0 and state["iterator"] is None else self._iterator
        return itertools.islice(indices, position - state["at"], None)

    def _replayed(self, state: OrderState, position: int) -> Iterator[Any]:
        if "epoch" in state:
            self._sampler.set_epoch(state["epoch"])
        generator = self._generator()
        if generator is not None and "generator" in state:
            generator.set_state(state["generator"])
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(state["begin"])
            rest = iter(self._sampler)
            torch.set_rng_state(state["first"])
            rest = _with_first_drawn(itertools.islice(rest, position, None))
        self._noted = state
        self._states.clear()
        return rest

    def _keep(self, state: OrderState, at: int) -> None:
        self._batches = 0
        self._first = state
        self._states.clear()
        if state["sampler"] is not None or state["iterator"] is not None:
            self._states.append((at, state))

    def _generator(self) -> torch.Generator | None:
        sampler = getattr(self._sampler, "sampler", self._sampler)  # one of batches has mostly one of indices
        generator = getattr(self._sampler, "generator", getattr(sampler, "generator", None))
        return generator if isinstance(generator, torch.Generator) else None

    def _has_epochs(self) -> bool:
        return hasattr(self._sampler, "set_epoch") and isinstance(getattr(self._sampler, "epoch", None), int)


def order_for(sampler: Any, *, snapshot_every: int) -> Order:
    """Return what is to be known of the sampler that a loader's batches (or single indices) are drawn from.

    Args:
        sampler: of indices or batches.
        snapshot_every: after how many batches that are drawn ahead of the loop a sampler is asked for its state.
    """
    sampler = drawn_from(sampler)
    if type(sampler) is SequentialSampler:
        return SequentialOrder(sampler)
    if type(sampler) is RandomSampler:
        return RandomOrder(sampler)
    if type(sampler) in (DistributedSampler, RankSampler):
        return DistributedOrder(sampler)
    if type(sampler) is ChunkShuffle:
        return ChunkShuffleOrder(sampler)
    return UnknownOrder(sampler, snapshot_every)


def drawn_from(sampler: Any) -> Any:
    """Return what torch's own BatchSampler cuts into batches; anything else as it is."""
    cut = plain_batches(sampler)
    return sampler if cut is None else cut[0]


def plain_batches(sampler: Any) -> tuple[Any, int, bool] | None:
    """Return what torch's own BatchSampler cuts into batches, how large, and whether the rest is dropped."""
    if type(sampler) is not BatchSampler:
        return None
    return sampler.sampler, sampler.batch_size, sampler.drop_last


def seed_drawn_from(random_state: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return the seed that torch's samplers and loaders draw from a random state, and the state after that."""
    generator = torch.Generator()
    generator.set_state(random_state)
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item()), generator.get_state()


def _with_first_drawn(indices: Iterator[Any]) -> Iterator[Any]:
    """Return the same indices; what the first one is drawn from is used now, and not when it is asked for."""
    first = list(itertools.islice(indices, 1))
    return itertools.chain(first, indices)


def is_same_state(one: Any, other: Any) -> bool:
    """Return whether two states are equal, tensors and arrays within them by their values.

    >>> is_same_state({"at": [torch.zeros(2), 1]}, {"at": [torch.zeros(2), 1]})
    True
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same_state(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same_state, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    with contextlib.suppress(Exception):  # what else a program's own state holds may not be comparable
        return bool(one == other)
    return False


def _state_of(thing: Any) -> Any:
    return thing.state_dict() if is_stateful(thing) else None
