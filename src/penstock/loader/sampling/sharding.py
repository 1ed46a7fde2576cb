"""Shares: which part of an order that all ranks have is one rank's, and the sampler that draws it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data.distributed import DistributedSampler

from penstock.core.errors import OptionError
from penstock.data.chunk_shuffle import ChunkShuffle

_AT_A_TIME = 1 << 16

Uneven = Literal["pad", "drop", "join"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One rank's part of an order that all ranks have.

    With blocks of one, rank r gets every `world`-th index, from the r-th on, as from torch's DistributedSampler. With
    blocks as large as a batch, whole batches are dealt, so that runs of samples stay together. Either way the first k
    batches of all ranks are the beginning of the order.

    >>> [Share(rank=rank, world=2).positions(5).tolist() for rank in range(2)]
    [[0, 2, 4], [1, 3, 0]]
    >>> [Share(rank=rank, world=2, uneven="join").positions(5).tolist() for rank in range(2)]
    [[0, 2, 4], [1, 3]]
    """

    rank: int = 0
    world: int = 1
    block: int = 1
    uneven: Uneven = "pad"
    """What becomes of a rest that is not one index for each rank: the first ones again, nothing, or for some ranks."""

    def positions(self, count: int) -> np.ndarray:
        """Return the places of this rank's indices in an order of `count`, int64[samples of the rank]."""
        if self.world == 1:
            return np.arange(count)
        total, whole = self._totals(count)
        places = np.arange(total) % max(1, count)
        blocks = places[:whole].reshape(-1, self.world, self.block)[:, self.rank].reshape(-1)
        return np.concatenate([blocks, places[whole:][self.rank :: self.world]])

    def size(self, count: int) -> int:
        """Return how many they are.

        >>> share = Share(rank=1, world=2, block=2, uneven="join")
        >>> share.size(7), len(share.positions(7))
        (3, 3)
        """
        total, whole = self._totals(count)
        return whole // self.world + len(range(self.rank, total - whole, self.world))

    def _totals(self, count: int) -> tuple[int, int]:
        """Return how many indices are shared out, and how many of them in whole blocks for all ranks."""
        total = {
            "pad": math.ceil(count / self.world) * self.world,
            "drop": count // self.world * self.world,
            "join": count,
        }[self.uneven]
        return total, total - total % (self.world * self.block)


class RankSampler(DistributedSampler[Any]):
    """What `DataLoader(..., distributed=True)` or `seed=` draws from: torch's DistributedSampler, bit for bit.

    Besides, it counts epochs by itself, has the ends that `uneven` says, and deals whole runs.

    Args:
        dataset: has a length.
        share: whose part.
        shuffle: in an order that the seed and the epoch make.
        seed: of the order, the same on all ranks.
        runs: an order by runs, in place of a permutation of single samples.

    >>> list(RankSampler(range(5), Share(rank=1, world=2), shuffle=False))
    [1, 3, 0]
    """

    def __init__(
        self, dataset: Any, share: Share, *, shuffle: bool, seed: int = 0, runs: ChunkShuffle | None = None
    ) -> None:
        super().__init__(dataset, share.world, share.rank, shuffle, seed, share.uneven == "drop")
        self.share = share
        self.runs = runs
        self._set_by_program: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`; without it the loader counts."""
        self.epoch = self._set_by_program = epoch

    def begin(self, epoch: int) -> int:
        """Begin the pass of `epoch`, or of the one that `set_epoch` has said; return which it is."""
        self.epoch = epoch if self._set_by_program is None else self._set_by_program
        self._set_by_program = None
        return self.epoch

    def __iter__(self) -> Iterator[int]:
        order = order_of_ranks(self, self.epoch, self.runs)
        return numbers(order if self.share.world == 1 else order[self.share.positions(len(order))])

    def __len__(self) -> int:
        return self.share.size(len(self.dataset))  # type: ignore[arg-type]


def numbers(indices: np.ndarray) -> Iterator[int]:
    """Return an iterator over an array's entries as Python's own whole numbers, of which few are there at a time.

    >>> list(numbers(np.arange(3)))
    [0, 1, 2]
    """
    parts = (indices[at : at + _AT_A_TIME].tolist() for at in range(0, len(indices), _AT_A_TIME))
    return itertools.chain.from_iterable(parts)


def order_of_ranks(sampler: DistributedSampler[Any], epoch: int, runs: ChunkShuffle | None) -> np.ndarray:
    """Return the order of all ranks in an epoch, int64[samples]: a permutation, or by runs."""
    count = len(sampler.dataset)  # type: ignore[arg-type]
    if not sampler.shuffle:
        return np.arange(count)
    if runs is not None:
        return np.fromiter(runs.drawn(sampler.seed, epoch), np.int64, count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(sampler.seed + epoch)).numpy()


def check_uneven(uneven: str) -> None:
    """Raise an error for an end that there is not.

    Raises:
        OptionError: it is none.
    """
    if uneven not in ("pad", "drop", "join"):
        raise OptionError(f"uneven must be 'pad', 'drop' or 'join', not {uneven!r}")
