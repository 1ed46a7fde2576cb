"""Orders whose index at any place can be asked for, and one rank's part of what is left of them, block by block."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from penstock.loader.sampling.sharding import Share

BLOCK = 1 << 15
"""Indices that are looked up at once: few for memory, and many for NumPy."""


class IndexedOrder(Protocol):
    """The indices of an epoch, of all ranks."""

    def __len__(self) -> int: ...

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the indices at some places, int64[places] of int64[places]."""
        ...


class SequentialIndices:
    """Each index at its own place.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the places."""
        return places


class DrawnIndices:
    """Indices in memory.

    Args:
        indices: whole numbers of any size.
    """

    def __init__(self, indices: np.ndarray) -> None:
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def at(self, places: np.ndarray) -> np.ndarray:
        """Look them up."""
        found: np.ndarray = self._indices[places].astype(np.int64, copy=False)
        return found


class WhatIsLeft:
    """Indices left over from an earlier pass, then an order from a position on, then the whole order again.

    Args:
        order: of all ranks.
        leftover: indices.
        position: where in the order.
    """

    def __init__(self, order: IndexedOrder, leftover: Sequence[int], position: int) -> None:
        self._order = order
        self._leftover = np.asarray(leftover, np.int64)
        self._position = position
        self.count = len(leftover) + len(order) - position
        """Without those that come again."""

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the indices at some places, int64[places] of int64[places] in ascending order."""
        if not len(places):
            return places
        before = len(self._leftover)
        inside = places - before + self._position
        if places[0] < before or places[-1] >= self.count:
            inside %= len(self._order)
        found = self._order.at(inside)
        if places[0] < before:
            is_before = places < before
            found[is_before] = self._leftover[places[is_before]]
        return found


def randperm(count: int, generator: torch.Generator) -> np.ndarray:
    """Return `torch.randperm(count, generator=generator)`, in half the memory where the indices fit into 32 bits.

    >>> randperm(3, torch.Generator().manual_seed(0)).tolist() == torch.randperm(
    ...     3, generator=torch.Generator().manual_seed(0)
    ... ).tolist()
    True
    """
    dtype = torch.int32 if count < 1 << 31 else torch.int64
    drawn: np.ndarray = torch.randperm(count, generator=generator, dtype=dtype).numpy()
    return drawn


def blocks_of_rank(
    order: IndexedOrder, share: Share, *, leftover: Sequence[int] = (), position: int = 0, multiple_of: int = 1
) -> Iterator[np.ndarray]:
    """Yield a rank's part of what is left of an order, in arrays int64[about BLOCK].

    Args:
        order: of all ranks.
        share: the rank's part.
        leftover: indices that come before the rest of the order.
        position: where in the order the rest begins.
        multiple_of: the size of all arrays but the last is a multiple of it.

    >>> order = SequentialIndices(7)
    >>> [block.tolist() for block in blocks_of_rank(order, Share(rank=1, world=2), leftover=[1], position=4)]
    [[4, 6]]
    """
    if share.world == 1 and not leftover:
        step = max(1, BLOCK // multiple_of) * multiple_of
        for start in range(position, len(order), step):
            yield order.at(np.arange(start, min(len(order), start + step)))
        return
    left = WhatIsLeft(order, leftover, position)
    size, step = share.size(left.count), max(1, BLOCK // multiple_of) * multiple_of
    for start in range(0, size if left.count else 0, step):
        places = share.places(np.arange(start, min(size, start + step)), left.count)
        yield left.at(places)


def numbers(blocks: Iterator[np.ndarray]) -> Iterator[int]:
    """Return the entries of arrays as Python's own whole numbers, of which few are there at a time.

    >>> list(numbers(iter([np.arange(2), np.arange(1)])))
    [0, 1, 0]
    """
    return itertools.chain.from_iterable(block.tolist() for block in blocks)
