"""A random order of samples that are read in chunks: chunks of HDF5, row groups of Parquet.

    chunks     are shuffled, and distributed over lanes, one for each worker
    blocks     of `window` chunks of a lane: their samples are shuffled together
    batches    batch k is cut from lane k mod lanes, so that a worker that gets every lanes-th batch reads the chunks of
               its lane only: each chunk is unpacked once

A window of 1 keeps samples of a chunk together; a larger one mixes more, and a worker caches as many chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from penstock.core.errors import OptionError
from penstock.data.chunks.chunk_order import ChunkOrder

SHUFFLE_BLOCK = 4
"""Chunks whose samples are shuffled together, by default."""

_FIRST, _MOST = 1 << 10, 1 << 15
"""Indices that are computed at once: few for the first batch, and many for NumPy."""


class ChunkShuffle(Sampler[int]):
    """Every sample once, in a random order that reads each chunk once.

    Args:
        starts: where each chunk begins, and at the end the number of samples: `chunk_starts` of a source.
        batch_size: of the batches that will be cut from this order.
        lanes: how many workers get the batches, round-robin; 1 for one worker, or none.
        window: chunks whose samples are shuffled together.
        seed: of the order; None draws one from torch's (or the generator's) random state for every epoch.
        generator: whose random state.

    Example:
        >>> order = ChunkShuffle([0, 4, 8], window=1, seed=0)
        >>> drawn = list(order)
        >>> sorted(drawn), {number // 4 for number in drawn[:4]} in ({0}, {1})
        ([0, 1, 2, 3, 4, 5, 6, 7], True)
    """

    def __init__(
        self,
        starts: Sequence[int] | np.ndarray,
        *,
        batch_size: int = 1,
        lanes: int = 1,
        window: int = SHUFFLE_BLOCK,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if batch_size < 1 or lanes < 1 or window < 1:
            raise OptionError(f"batch_size={batch_size}, lanes={lanes} and window={window} have to be 1 or more")
        self._starts = np.asarray(starts, np.int64)
        self._batch_size = batch_size
        self._lanes = lanes
        self._window = window
        self._seed = seed
        self._generator = generator
        self._epoch = 0

    def __len__(self) -> int:
        return int(self._starts[-1])

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`; without it, each pass is the next epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from self.drawn(*self.draw())

    def draw(self) -> tuple[int, int]:
        """Begin a pass; return its seed and its epoch."""
        seed, epoch = self._seed, self._epoch
        if seed is None:
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())
        self._epoch += 1
        return seed, epoch

    def next_pass(self) -> dict[str, Any]:
        """Return what the next pass will be drawn from: its epoch, and the state of its generator, if it has one."""
        generator = {} if self._generator is None else {"generator": self._generator.get_state()}
        return {"epoch": self._epoch, **generator}

    def set_next_pass(self, state: dict[str, Any]) -> None:
        """Draw the next pass from what `next_pass` returned."""
        self._epoch = state["epoch"]
        if self._generator is not None and "generator" in state:
            self._generator.set_state(state["generator"])

    @property
    def purpose(self) -> dict[str, int]:
        """The arguments that depend on the loader, of `made_for`."""
        return {"batch_size": self._batch_size, "lanes": self._lanes, "window": self._window}

    def made_for(self, purpose: dict[str, int]) -> ChunkShuffle:
        """Return an order of the same chunks for other batches and lanes."""
        return ChunkShuffle(self._starts, generator=self._generator, **purpose)

    def order(self, seed: int, epoch: int) -> ChunkOrder:
        """Return the order of a seed and an epoch, whose index at any place can be asked for."""
        return ChunkOrder(self._starts, **self.purpose, seed=seed, epoch=epoch)

    def drawn(self, seed: int, epoch: int) -> Iterator[int]:
        """Yield the indices in the order of a seed and an epoch."""
        order, at_once, start = self.order(seed, epoch), _FIRST, 0
        while start < len(self):
            yield from order.at(np.arange(start, min(len(self), start + at_once))).tolist()
            start, at_once = start + at_once, min(_MOST, 2 * at_once)
