"""UnknownOrder: of a sampler that is not torch's or penstock's; and whether two states are equal."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from penstock.core.errors import StateError
from penstock.distributed.rank import rank_and_world_size
from penstock.loader.sampling.index_digest import digest_after, index_words
from penstock.loader.sampling.sharding import Share
from penstock.loader.workers.worker_spec import is_stateful

OrderState = dict[str, Any]
"""How the indices of an epoch were drawn, as plain values."""


class UnknownOrder:
    """Any other sampler, of indices or of batches.

    A sampler that keeps a state, or whose iterator does (as torchdata's), is asked for it: where batches are drawn
    ahead of the loop, after every few of them (`every`); else when a state is wanted. The indices of any other are
    repeated by restoring torch's random state and the sampler's epoch.
    """

    share = Share()

    def __init__(self, sampler: Any, every: int, *, is_batched: bool = False) -> None:
        self._sampler = sampler
        self._every = max(1, every)
        self._is_batched = is_batched
        """Whether the loader cuts into batches what the sampler gives; otherwise it may give batches of its own."""
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
        before = _copied_state_of(self._sampler)
        self._iterator = iter(self._sampler)
        self._keep({"sampler": before, "iterator": _copied_state_of(self._iterator)}, 0)
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
        tells_nothing = state["sampler"] is None and state["iterator"] is None  # as some do when they are at their end
        if not tells_nothing and not is_same_state(state, self._first):
            self._states.append((at, state))

    def capture(self, taken: int, drawn: int | None) -> OrderState:
        """Return the last state from which nothing is missing and when it was taken; or else what was noted."""
        if not self._states:
            return {"first": torch.get_rng_state(), **self._noted}
        if taken == drawn and self._states[-1][0] < drawn:
            self._keep_state(drawn, self._now())
        self.forget(taken)
        at, state = self._states[0]
        return {**state, "at": at}

    def forget(self, taken: int) -> None:
        """Forget the states before the last one from which nothing is missing."""
        while len(self._states) > 1 and self._states[1][0] <= taken:
            self._states.popleft()

    def replay(self, state: OrderState, position: int, digest: int | None = None) -> Iterator[Any]:
        """Return what comes from `position` on; of a sampler without a state, after drawing what comes before."""
        self._is_after_end = False
        return self._from_state(state, position) if "at" in state else self._replayed(state, position, digest)

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

    def _replayed(self, state: OrderState, position: int, digest: int | None) -> Iterator[Any]:
        if "epoch" in state:
            self._sampler.set_epoch(state["epoch"])
        generator = self._generator()
        if generator is not None and "generator" in state:
            generator.set_state(state["generator"])
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(state["begin"])
            rest = iter(self._sampler)
            torch.set_rng_state(state["first"])
            passed = self._digest_of(itertools.islice(rest, position))
            rest = with_first_drawn(rest)
        if digest is not None and passed != digest:
            raise StateError(
                f"{type(self._sampler).__qualname__} does not give the {position} indices again that were drawn when "
                "this state was saved, so some samples would come twice and others never: it may draw from Python's or "
                "NumPy's random state, or count its epochs. Give it state_dict() and load_state_dict(), have it draw "
                "what it needs from torch's random state when it begins, or begin the epoch anew"
            )
        self._noted = state
        self._states.clear()
        return rest

    def _digest_of(self, drawn: Iterator[Any]) -> int | None:
        """Draw all, and return the digest of it; None where it cannot be told."""
        digest: int | None = 0
        for batch in [list(drawn)] if self._is_batched else drawn:
            words = index_words(batch)
            digest = None if digest is None or words is None else digest_after(digest, words)
        return digest

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


def with_first_drawn(indices: Iterator[Any]) -> Iterator[Any]:
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


def _copied_state_of(thing: Any) -> Any:
    return copy.deepcopy(thing.state_dict()) if is_stateful(thing) else None


def _state_of(thing: Any) -> Any:
    return thing.state_dict() if is_stateful(thing) else None
