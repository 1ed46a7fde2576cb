"""Order: what is to be known of a sampler, so that another process can draw the indices of an epoch again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from penstock.loader.sampling.indexed_order import IndexedOrder
from penstock.loader.sampling.sharding import Share

OrderState = dict[str, Any]
"""How the indices of an epoch were drawn, as plain values."""


class Order(Protocol):
    """One kind of sampler, during an epoch. All methods are called by the thread that iterates.

    In an epoch: `begin`, `note_state` before the first index, `note_drawn` after each batch, `capture` and `end_state`
    for a checkpoint at any time. To resume: `replay` in the place of `begin`, or `begin_after` before it.
    """

    share: Share
    is_known: bool
    """Whether the same indices can be drawn again for sure; else a digest of them tells."""

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

    def capture(self, taken: int, drawn: int | None) -> OrderState:
        """Return what `replay` needs when `taken` of the `drawn` indices of this epoch have been handed out.

        `drawn` is None after the sampler has said that there are no more.
        """
        ...

    def forget(self, taken: int) -> None:
        """Forget what only a state with fewer indices than `taken` would need; called after every few batches."""
        ...

    def indexed(self, state: OrderState) -> IndexedOrder | None:
        """Return the same epoch's order of all ranks; None where only `replay` draws it again."""
        ...

    def replay(self, state: OrderState, position: int, digest: int | None = None) -> Iterable[Any]:
        """Return the indices of the same epoch from `position` on.

        Raises:
            StateError: those before it are not the ones that had this digest, of an order that is not known.
        """
        ...

    def end_state(self) -> OrderState:
        """Return the state from which the next epoch will be drawn, as far as the sampler holds it."""
        ...

    def begin_after(self, end: OrderState) -> None:
        """Prepare the sampler for the epoch after the one whose `end_state` this is."""
        ...


def with_first_drawn(indices: Iterator[Any]) -> Iterator[Any]:
    """Return the same indices; what the first one is drawn from is used now, and not when it is asked for."""
    first = list(itertools.islice(indices, 1))
    return itertools.chain(first, indices)
