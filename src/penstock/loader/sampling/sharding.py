"""Shares: which part of an order that all ranks have is one rank's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.core.errors import OptionError

Uneven = Literal["pad", "drop", "join"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One rank's part of an order that all ranks have.

    With blocks of one, rank r gets every `world`-th index, from the r-th on, as from torch's DistributedSampler. With
    blocks as large as a batch, whole batches are dealt, so that runs of samples stay together. Either way the first k
    batches of all ranks are the beginning of the order.

    >>> [Share(rank=rank, world=2).places(np.arange(3), 5).tolist() for rank in range(2)]
    [[0, 2, 4], [1, 3, 5]]
    >>> [Share(rank=rank, world=2, uneven="join").size(5) for rank in range(2)]
    [3, 2]
    """

    rank: int = 0
    world: int = 1
    block: int = 1
    uneven: Uneven = "pad"
    """What becomes of a rest that is not one index for each rank: the first ones again, nothing, or for some ranks."""

    def places(self, numbers: np.ndarray, count: int) -> np.ndarray:
        """Return the places of some of this rank's indices, int64[numbers]; places beyond `count` are padding.

        Args:
            numbers: which of the rank's indices, int64[numbers].
            count: how many indices all ranks share out.
        """
        if self.block == 1:
            return numbers * self.world + self.rank
        _, whole = self._totals(count)
        blocks, inside = np.divmod(numbers, self.block)
        places: np.ndarray = (blocks * self.world + self.rank) * self.block + inside
        dealt = whole // self.world
        return np.where(numbers < dealt, places, whole + self.rank + (numbers - dealt) * self.world)

    def size(self, count: int) -> int:
        """Return how many they are."""
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


def check_uneven(uneven: str) -> None:
    """Raise an error for an end that there is not.

    Raises:
        OptionError: it is none.
    """
    if uneven not in ("pad", "drop", "join"):
        raise OptionError(f"uneven must be 'pad', 'drop' or 'join', not {uneven!r}")
