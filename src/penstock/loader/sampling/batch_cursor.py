"""BatchCursor: the batches of indices of one epoch, and which of them have been handed out.

Batches are drawn ahead of the loop, and may be handed out in another order. The state must not grow with the position,
so it holds numbers: where the pass began, how many indices have been taken, and those among them that are still under
way.

    order of all ranks     ├── handed out by earlier passes ──┼─ taken ──┬┄ drawn ahead ┄┬┄┄┄┄┄┄┄┄┄┄┄┄┄┤
    this rank's part       every world-th of what was left    └ without what is still under way
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler

from penstock.core.errors import StateError
from penstock.loader.sampling.index_digest import PassDigest, index_words
from penstock.loader.sampling.indexed_order import WhatIsLeft, blocks_of_rank, numbers
from penstock.loader.sampling.orders import Order, plain_batches
from penstock.loader.sampling.sharding import Share
from penstock.loader.sampling.unknown_order import OrderState, UnknownOrder, with_first_drawn

_TIDY_EVERY = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class PassStart:
    """Where a pass begins: with indices left over from the pass before, then from a position of the order."""

    position: int = 0
    leftover: list[Any] = field(default_factory=list)
    order_state: OrderState | None = None
    """How the order was drawn; None while it is still to be drawn."""
    random: torch.Tensor | None = None
    """Torch's random state from which it is to be drawn, where a state was taken before that."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values, for a checkpoint."""
        return {name: getattr(self, name) for name in ("position", "leftover", "order_state", "random")}


_FROM_THE_START = PassStart()


@dataclass(frozen=True, kw_only=True, slots=True)
class CursorState:
    """How much one rank has taken of a pass."""

    start: PassStart
    rank: int
    world: int
    block: int
    uneven: Any
    taken: int
    """Indices up to the last one that was handed out."""
    pending: list[Any]
    """The indices among them that were not handed out."""
    in_order: bool

    @classmethod
    def of(cls, state: dict[str, Any]) -> CursorState:
        """Return the state that `as_dict` has written."""
        return cls(**{**state, "start": PassStart(**state["start"])})

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values, for a checkpoint."""
        names = ("rank", "world", "block", "uneven", "taken", "pending", "in_order")
        return {"start": self.start.as_dict(), **{name: getattr(self, name) for name in names}}

    @property
    def share(self) -> Share:
        """The rank's part of the order."""
        return Share(rank=self.rank, world=self.world, block=self.block, uneven=self.uneven)


class BatchCursor(Iterator[Any]):
    """Yields the batches of indices of one pass, and keeps its position.

    Args:
        sampler: of batches (or of single indices where nothing is batched).
        order: of what the sampler draws from; see `orders`.
        start: where the pass begins; the beginning of an epoch without it.
        in_order: whether batches are handed out in their order.
        draws_ahead: whether batches are drawn before the loop asks for them.
        digest: is given the indices of each batch that is taken, in the order in which they are drawn.

    >>> from torch.utils.data import BatchSampler, SequentialSampler
    >>> from penstock.loader.sampling.orders import order_for
    >>> sampler = BatchSampler(SequentialSampler(range(5)), 2, False)
    >>> cursor = BatchCursor(sampler, order_for(sampler, snapshot_every=1))
    >>> next(cursor), next(cursor)
    ([0, 1], [2, 3])
    >>> cursor.consume([0])
    >>> list(BatchCursor(sampler, order_for(sampler, snapshot_every=1), start=pass_start_after([cursor.state()], None)))
    [[2, 3], [4]]
    """

    def __init__(
        self,
        sampler: Any,
        order: Order,
        *,
        start: PassStart | None = None,
        in_order: bool = True,
        draws_ahead: bool = True,
        digest: PassDigest | None = None,
    ) -> None:
        self._share = order.share
        self._unknown = order if isinstance(order, UnknownOrder) else None
        self._known = None if isinstance(order, UnknownOrder) else order
        self._notes_drawn = draws_ahead and self._unknown is not None
        self._digest = digest
        self._noted: dict[int, Any] = {}
        """What a sampler of the program's own, which may change its lists later, has drawn and was not taken."""
        self._start = start or _FROM_THE_START
        self._in_order = in_order
        self._sampler = sampler
        self._cut = plain_batches(sampler)
        self._makes_batches = self._cut is not None
        self._draws_tensors = False
        self._notes_first = False
        """Whether the order notes its state when it is asked for the first batch."""
        self._out: dict[int, Any] = {}
        """Batches drawn and not handed out, by number."""
        self._untaken: list[Any] = []
        """Those of `draw`."""
        self.packed = b""
        """The batch of indices that was yielded last, as integers of 4 or 8 bytes; empty if they are something else."""
        self._number = 0
        self._drawn = 0
        self._has_drawn_first = False
        self._has_ended = False
        """Whether the sampler has been asked for more than it has: its own state may be the next epoch's since."""
        self._used = 0
        before = digest.state() if digest is not None and start is not None else None
        self._expected = before[-1] if before else None
        """The digest of what this rank had taken of the order before this pass, indices left over included."""
        self._in_digest = len(self._start.leftover) if before and before[1] else 0
        """How many of this pass's indices are in that digest already."""
        self._order_state = self._start.order_state
        """How the order was drawn; of an order that is known, from the first index on."""
        if self._unknown is None:
            self._batches = self._known_batches()
        elif self._order_state is None:
            self._batches = self._fresh(self._unknown)
        else:
            rest = self._unknown.replay(self._order_state, self._start.position, self._expected)
            indices = itertools.chain(self._start.leftover, rest)
            self._batches = indices if self._cut is None else self._batched(indices)

    def __next__(self) -> Any:
        if self._notes_first and self._unknown is not None:
            self._notes_first = False
            self._unknown.note_state()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._has_ended = True
            raise
        self._out[self._number] = batch
        if self._unknown is not None and self._digest is not None:
            words = index_words(batch)
            self._noted[self._number] = None if words is None else words.copy()  # an array may be the sampler's own
        self._number += 1
        self._drawn += len(batch) if self._makes_batches else 1
        if self._notes_drawn and self._unknown is not None:
            self._unknown.note_drawn(self._place(self._drawn))
        if type(batch) is np.ndarray and self._unknown is None:
            self.packed = batch.tobytes()
            return batch.tolist()
        self.packed = b""
        return batch

    @property
    def is_plain(self) -> bool:
        """Whether a loop may `draw` and `take` each batch, which takes less time: a whole pass of torch's samplers."""
        return self._known is not None and self._makes_batches and self._start is _FROM_THE_START

    def draw(self) -> Any:
        """Return the next batch as it was drawn: a list, or an array or tensor (int64)."""
        batch = next(self._batches)
        self._drawn += len(batch)
        self._untaken.append(batch)
        return batch

    def take(self) -> None:
        """Record that the batch of the last `draw` was handed out; those before it that were not have failed."""
        if self._digest is not None:
            for batch in self._untaken:
                self._digest.add(batch)
        self._untaken.clear()

    def draw_tensors(self) -> bool:
        """Have the batches that torch's own samplers draw come as tensors; return whether no others are tensors.

        Called before the first batch.
        """
        self._draws_tensors = self._makes_batches
        return self._draws_tensors

    def draw_first(self) -> None:
        """Draw what the first index is drawn from, and not when it is asked for."""
        if self._known is not None:
            self._order_state = self._order_state or self._known.draw()
            return
        if self._notes_first and self._unknown is not None:
            self._notes_first = False
            self._unknown.note_state()
        self._batches, self._has_drawn_first = with_first_drawn(self._batches), True

    def consume(self, numbers: Iterable[int]) -> None:
        """Record that batches with these numbers have been handed out (or had nothing to hand out)."""
        for number in numbers:
            self.consume_one(number)

    def consume_one(self, number: int) -> None:
        """Record that this batch has been handed out."""
        batch = self._out.pop(number, None)
        if number >= self._used:
            if self._digest is not None:
                for earlier in range(self._used, number):  # handed out later
                    self._add_to_digest(earlier, self._out[earlier])
                self._add_to_digest(number, batch)
            self._used = number + 1
            if self._used % _TIDY_EVERY == 0 and self._unknown is not None:
                self._unknown.forget(self._place(self._taken()))

    @property
    def has_drawn(self) -> bool:
        """Whether the order of this epoch exists."""
        return self._drawn > 0 or self._has_drawn_first or self._order_state is not None

    def state(self) -> CursorState:
        """Return how much has been taken until now."""
        pending = [batch for number, batch in sorted(self._out.items()) if number < self._used]
        taken, share = self._taken(), self._share
        return CursorState(
            start=self._start_after(taken),
            rank=share.rank,
            world=share.world,
            block=share.block,
            uneven=share.uneven,
            taken=taken,
            pending=_plain([*itertools.chain.from_iterable(pending)] if self._makes_batches else pending),
            in_order=self._in_order,
        )

    def _start_after(self, taken: int) -> PassStart:
        """Return the start, with how its order was drawn, or what it is drawn from."""
        start = self._start
        if start.order_state is not None and "at" not in start.order_state:
            return start
        drawn_how = self._order_state
        # Else the iterator of a sampler that is not known has not been made.
        if self._unknown is not None and (self._drawn or self._has_drawn_first or self._cut is None):
            drawn = None if self._has_ended else self._place(self._drawn)
            drawn_how = self._unknown.capture(self._place(taken), drawn)
        if drawn_how is not None:
            start = replace(start, order_state=drawn_how, random=None)
            if self.has_drawn and "at" not in drawn_how:
                self._start = start  # it does not depend on how much was taken
            return start
        return start if start.random is not None else replace(start, random=torch.get_rng_state())

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _add_to_digest(self, number: int, batch: Any) -> None:
        assert self._digest is not None
        is_known = self._unknown is None
        indices = (batch if self._makes_batches else [batch]) if is_known else self._noted.pop(number)
        if self._in_digest and indices is not None:
            self._in_digest, indices = max(0, self._in_digest - len(indices)), indices[self._in_digest :]
        self._digest.add(indices)

    def _taken(self) -> int:
        """Return how many indices have been drawn up to the last batch that was handed out."""
        under_way = [batch for number, batch in self._out.items() if number >= self._used]
        return self._drawn - sum(map(self._count, under_way)) - sum(map(len, self._untaken))

    def _place(self, taken: int) -> int:
        """Return how many indices have been drawn of the order itself when `taken` of this pass are."""
        return self._start.position + max(0, taken - len(self._start.leftover))

    def _count(self, batch: Any) -> int:
        return len(batch) if self._makes_batches else 1

    def _known_batches(self) -> Iterator[Any]:
        """Yield what is left of a known order; the sampler draws when it is asked for the first index."""
        if self._cut is None:
            yield from numbers(self._blocks(1))
        else:
            size = self._cut[1]
            yield from _index_batches(self._sampler, self._blocks(size), as_tensors=self._draws_tensors)

    def _blocks(self, size: int) -> Iterator[np.ndarray]:
        order, start = self._known, self._start
        assert order is not None
        if self._order_state is None:
            self._order_state = order.draw()
        indexed, begin = order.indexed(self._order_state), start.position
        for block in blocks_of_rank(indexed, order.share, leftover=start.leftover, position=begin, multiple_of=size):
            whole = len(block) - len(block) % size
            if whole == len(block) or not order.draws_beyond:
                yield block
                continue
            if whole:
                yield block[:whole]
            order.end()  # the sampler is asked for one more index, which the last batch is short of
            yield block[whole:]
            return
        order.end()

    def _fresh(self, order: UnknownOrder) -> Iterator[Any]:
        if self._cut is None:
            self._notes_first = True
            return order.begin()  # itself: one that raises may be asked again
        return self._noted_batches(order)

    def _noted_batches(self, order: UnknownOrder) -> Iterator[Any]:
        indices = order.begin()
        order.note_state()
        yield from self._batched(indices)

    def _batched(self, indices: Iterator[Any]) -> Iterator[list[Any]]:
        assert self._cut is not None
        _, size, drops_last = self._cut
        while batch := list(itertools.islice(indices, size)):
            if len(batch) == size or not drops_last:
                yield batch
            if not drops_last:
                size = self._sampler.batch_size  # which a program may change in the middle of a pass


def _index_batches(sampler: BatchSampler, blocks: Iterator[np.ndarray], *, as_tensors: bool) -> Iterator[Any]:
    """Yield the batches of torch's own BatchSampler, as int64 arrays or tensors.

    Args:
        sampler: of the batches.
        blocks: what it draws, in arrays int64[a multiple of the batch size]; the last one may have any length.
        as_tensors: whether batches are tensors.
    """
    size, drops_last = sampler.batch_size, sampler.drop_last
    for block in blocks:
        taken = 0
        for batch in _cut(block, size, drops_last=drops_last, as_tensors=as_tensors):
            yield batch
            taken += size
            if sampler.batch_size != size and not drops_last:
                yield from _cut_anew(sampler, np.concatenate([block[taken:], *blocks]), as_tensors=as_tensors)
                return


def _cut(block: np.ndarray, size: int, *, drops_last: bool, as_tensors: bool) -> Iterable[Any]:
    end = len(block) - len(block) % size if drops_last else len(block)
    if not as_tensors:
        return (block[start : start + size] for start in range(0, end, size))
    whole = torch.from_numpy(block)
    # A view by itself costs 2 µs, one of many 0.3 µs, and to cut what is one batch 4 µs.
    views = whole.split(size) if len(block) > size else (whole,)
    return views if end == len(block) else views[:-1]


def _cut_anew(sampler: BatchSampler, indices: np.ndarray, *, as_tensors: bool) -> Iterator[Any]:
    """Yield the rest of a pass in batches of the size that the program sets meanwhile: torch asks before each batch.

    A size of 0 ends the pass, as it does there.
    """
    while len(batch := indices[: sampler.batch_size]):
        indices = indices[len(batch) :]
        yield torch.from_numpy(batch) if as_tensors else batch


def _plain(index: Any) -> Any:
    """Return an index, or a list of some, in Python's own whole numbers, which a checkpoint may hold.

    >>> _plain([np.int64(3), "a"])
    [3, 'a']
    """
    if isinstance(index, list):
        return [_plain(one) for one in index]
    try:
        return operator.index(index)
    except TypeError:
        return index


def is_over(sampler: Any, order: Order, start: PassStart) -> bool:
    """Return whether a pass from `start` on has no batch; False where that is not known without drawing it."""
    if isinstance(order, UnknownOrder):
        return False
    drawn, size, drops_last = plain_batches(sampler) or (sampler, 1, False)
    try:
        count = len(drawn if order.share.world == 1 else drawn.dataset)
    except (AttributeError, NotImplementedError, TypeError):
        return False
    left = order.share.size(max(0, count - start.position) + len(start.leftover))
    return left < (size if drops_last else 1)


def pass_start_after(states: Sequence[CursorState], order: Any) -> PassStart:
    """Return where a pass begins that resumes after what ranks have taken.

    The state of one rank will do when batches are handed out in order: all ranks have taken as many.

    Args:
        states: of one rank, or of all.
        order: of the loader that resumes; used only for the states of several ranks.

    Raises:
        StateError: more states are needed, or these are not of one pass.
    """
    one = states[0]
    if len(states) == 1:
        if one.world > 1 and not one.in_order:
            raise StateError(
                f"each of the {one.world} ranks has handed out other batches (in_order=False, or errors= with "
                "uneven='join'); load the states of all: load_state_dict([state of rank 0, state of rank 1, ...])"
            )
        return _after(one)
    if sorted(state.rank for state in states) != list(range(one.world)):
        ranks = sorted(state.rank for state in states)
        raise StateError(f"these are the states of ranks {ranks}, and those of ranks 0 to {one.world - 1} are needed")
    if any((state.world, state.start.position) != (one.world, one.start.position) for state in states):
        raise StateError("these states were not taken in the same pass; load those that were saved together")
    return _after_all(states, order)


def _after(one: CursorState) -> PassStart:
    start = one.start
    if start.order_state is None:
        return start
    done = one.taken * one.world
    left_over = [*one.pending, *start.leftover[done:]]
    return PassStart(
        position=start.position + max(0, done - len(start.leftover)),
        leftover=left_over,
        order_state=start.order_state,
    )


def _after_all(states: Sequence[CursorState], order: Any) -> PassStart:
    drawn = [state for state in states if state.start.order_state is not None]
    if not drawn:
        return states[0].start
    start = drawn[0].start
    left = WhatIsLeft(order.indexed(start.order_state), start.leftover, start.position)
    one = states[0]
    # As many as every rank has had, in whole blocks, are the beginning; with what came after it memory must not grow.
    had = min(state.taken for state in states) // one.block * one.block
    begin = min(had * one.world, left.count)
    taken = [state.share.places(np.arange(had, state.taken), left.count) for state in states]
    places = np.concatenate(taken)
    places = places[places < left.count]
    last = int(places.max(initial=begin - 1)) + 1
    is_left = np.ones(last - begin, bool)
    is_left[places - begin] = False
    left_over = left.at(begin + np.flatnonzero(is_left)).tolist()
    for state in states:
        left_over += state.pending
    position = start.position + max(0, last - len(start.leftover))
    left_over += start.leftover[last:]
    return PassStart(position=position, leftover=left_over, order_state=start.order_state)
