"""The order of samples that lie in runs: chunks of HDF5, row groups of Parquet, whatever is read and unpacked whole.

    runs       shuffled, and dealt out to lanes, one for each worker
    groups     of `window` runs in a lane: their samples are shuffled together
    batches    batch k is cut from lane k mod lanes, so that a worker that gets every lanes-th batch reads its runs, and
               nobody else's: each run once

A window of one keeps samples of a run together; a larger one mixes more, and a worker holds as many runs at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from penstock.core.errors import OptionError, SourceError

WINDOW = 4
"""Runs that are shuffled together."""

_STATE = 1


class RunOrder(Sampler[int]):
    """Every sample once, in an order that is random and reads each run once.

    Args:
        starts: where each run begins, and at the end the number of samples.
        batch_size: of the batches that will be cut from this order.
        lanes: how many workers take them in turn; 1 for one, or none.
        window: runs that are shuffled together.
        seed: of the order; drawn from torch's (or the generator's) random state for every epoch where it is None.
        generator: whose random state.

    Example:
        >>> order = RunOrder([0, 4, 8], window=1, seed=0)
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
        window: int = WINDOW,
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
        self._position = 0
        self._drawn = 0
        self._resumes: tuple[int, int, int] | None = None

    def __len__(self) -> int:
        return int(self._starts[-1])

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`; without it passes count by themselves."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return where the current pass is."""
        return {"version": _STATE, "seed": self._drawn, "epoch": self._epoch - 1, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next pass go on where `state` was taken.

        Raises:
            SourceError: it is the state of something else.
        """
        try:
            seed, epoch, position = int(state["seed"]), int(state["epoch"]), int(state["position"])
        except (KeyError, TypeError, ValueError) as error:
            raise SourceError(f"this is no state of an order of runs: {state!r}") from error
        if state.get("version") != _STATE or not 0 <= position <= len(self):
            raise SourceError(f"this is no state of this order of {len(self)} samples: {state!r}")
        self._resumes = (seed, epoch, position)

    def __iter__(self) -> Iterator[int]:
        start = 0
        if self._resumes is not None:
            self._drawn, self._epoch, start = self._resumes
            self._resumes = None
        elif self._seed is not None:
            self._drawn = self._seed
        else:
            self._drawn = int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())
        epoch = self._epoch
        self._epoch += 1
        self._position = start
        for index in itertools.islice(self.drawn(self._drawn, epoch), start, None):
            self._position += 1
            yield index

    def next_pass(self) -> dict[str, Any]:
        """Return what the next pass will be drawn from: its epoch, and the state of a generator of one's own."""
        generator = {} if self._generator is None else {"generator": self._generator.get_state()}
        return {"epoch": self._epoch, **generator}

    def set_next_pass(self, told: dict[str, Any]) -> None:
        """Have the next pass be drawn from what `next_pass` has told."""
        self._epoch = told["epoch"]
        if self._generator is not None and "generator" in told:
            self._generator.set_state(told["generator"])

    def as_drawn(self) -> tuple[int, int]:
        """Return the seed and the epoch of the current pass."""
        return self._drawn, self._epoch - 1

    @property
    def purpose(self) -> dict[str, int]:
        """The batches and the lanes that the order is made for."""
        return {"batch_size": self._batch_size, "lanes": self._lanes, "window": self._window}

    def made_for(self, purpose: dict[str, int]) -> RunOrder:
        """Return an order of the same runs, made for other batches and lanes."""
        return RunOrder(self._starts, generator=self._generator, **purpose)

    def drawn(self, seed: int, epoch: int) -> Iterator[int]:
        """Yield all indices in the order that a seed and an epoch make."""
        rng = np.random.default_rng([seed & (2**64 - 1), epoch])
        runs = rng.permutation(len(self._starts) - 1)
        lanes = [self._lane(runs[lane :: self._lanes], rng.spawn(1)[0]) for lane in range(self._lanes)]
        turn = 0
        while lanes:
            lane = lanes[turn % len(lanes)]
            batch = list(itertools.islice(lane, self._batch_size))
            while len(batch) < self._batch_size and lanes:  # this lane has ended; the others fill up its last batch
                lanes.remove(lane)
                lane = lanes[turn % len(lanes)] if lanes else lane
                batch += itertools.islice(lane, self._batch_size - len(batch))
            yield from batch
            turn += 1

    def _lane(self, runs: np.ndarray, rng: np.random.Generator) -> Iterator[int]:
        for at in range(0, len(runs), self._window):
            group = [np.arange(self._starts[run], self._starts[run + 1]) for run in runs[at : at + self._window]]
            indices = np.concatenate(group)
            rng.shuffle(indices)
            yield from indices.tolist()
