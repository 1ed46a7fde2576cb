"""Lanes: the streams of an iterable dataset, as many as the dataset is told that there are workers.

An iterable dataset shares out its samples by `get_worker_info()`. So a lane is one share: the dataset, told that it is
worker `number` of `of`. Mostly each worker process has one lane. A loop that goes on with another number of workers
has the lanes of the one that was interrupted, each from where it was, and a process runs several of them by turns,
each with a copy of the dataset and random states of its own. Of map-style datasets there are no lanes.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from penstock.core.errors import StateError
from penstock.feed.workers.maker import BatchMaker, Job


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One share of an iterable dataset, and where it begins."""

    number: int
    of: int
    """How many workers the dataset is told of; 0 where it is told of none."""
    rank: int = 0
    """The rank that had begun it."""
    epoch_seed: int | None = None
    """What the randomness of its samples depends on."""
    has_ended: bool = False
    state: Any = None
    """What `BatchMaker.snapshot` has returned."""
    since: tuple[tuple[int, int], ...] = ()
    """Batches that were made since, as (how many, of how many samples); they are made again, and thrown away."""
    end: Any = None
    """The dataset's state at the end of a pass; of one that has not ended, at the end of the pass before."""
    is_restored: bool = True
    """Whether it begins in a process that has not been at that end itself."""

    def after(self, size: int, state: Any = None) -> Lane:
        """Return the lane after another batch of `size`, and with the state that was taken then, if one was.

        >>> Lane(number=0, of=2).after(8).after(8).after(4).since
        ((2, 8), (1, 4))
        """
        if state is not None:
            return replace(self, state=state, since=())
        if self.since and self.since[-1][1] == size:
            return replace(self, since=(*self.since[:-1], (self.since[-1][0] + 1, size)))
        return replace(self, since=(*self.since, (1, size)))


Tell = Callable[[Lane, Job], None]
"""Called before a lane's dataset is asked for samples: makes it known to `get_worker_info()`."""

Init = Callable[[int], Any]
"""The loader's worker_init_fn: called for a lane with its number, where the process was not set up for it."""

Seed = Callable[[Lane], None]
"""Called before a lane begins: gives it the random states that it would have as a worker's only one."""


class Lanes:
    """The makers of one worker.

    Args:
        job: what all of them do.
        lanes: those of this worker, by their places in the round; one without a number for map-style datasets.
        tell: see `Tell`.
        seed: see `Seed`; None where random states are the training loop's, and must stay as they are.
        init: see `Init`.
        own: the lane for which this process was set up.
    """

    def __init__(
        self,
        job: Job,
        lanes: Mapping[int, Lane],
        tell: Tell,
        *,
        seed: Seed | None = None,
        init: Init | None = None,
        own: Lane | None = None,
    ) -> None:
        self._job = job
        self._init = init
        self._tell = tell
        self._seed = seed
        self._own = own
        self._lanes: Mapping[int, Lane] = {}
        self._makers: dict[int, BatchMaker] = {}
        self._states: dict[int, Any] = {}
        self._current = -1
        self.begin(lanes)

    def begin(self, lanes: Mapping[int, Lane]) -> None:
        """Begin an epoch."""
        if not self._job.iterable:
            if not self._makers:
                self._makers[0] = self._made(self._job)
            return
        lanes = {place: lane for place, lane in lanes.items() if not lane.has_ended}
        self._lanes = lanes
        is_same = len(self._makers) == len(lanes) == 1
        jobs = {} if is_same else self._copies(lanes)
        makers, self._makers, self._states, self._current = self._makers, {}, {}, -1
        for place, lane in lanes.items():
            job = self._job if is_same else jobs[place]
            self._enter(place, lane, job)
            if self._init is not None and lane.of and not self._is_own(lane):
                self._init(lane.number)
            maker = next(iter(makers.values())) if is_same else self._made(job)
            # Who has been at that end remembers it: the training process, and a worker that has lived on.
            has_been_there = not lane.is_restored and (self._own is None or is_same)
            maker.restart(f"{lane.rank}.{lane.number}", lane.state, None if has_been_there else lane.end)
            for batches, size in lane.since:
                for _ in range(batches):
                    maker.pass_over(size, lane.epoch_seed)
            self._makers[place] = maker

    def maker(self, place: int) -> BatchMaker | None:
        """Return the maker of a lane (0 for map-style datasets), which now runs; None if it could not be begun."""
        maker = self._makers.get(place)
        if self._job.iterable and maker is not None and place != self._current:
            self._enter(place, self._lanes[place], maker.job)
        return maker

    def leave(self) -> None:
        """Have no lane run: `get_worker_info()` says what it says in this process."""
        if any(lane.of for lane in self._lanes.values()):
            self._tell(Lane(number=0, of=0), self._job)
            self._current = -1

    def _is_own(self, lane: Lane) -> bool:
        return self._own is not None and (lane.number, lane.of) == (self._own.number, self._own.of)

    def _made(self, job: Job) -> BatchMaker:
        return BatchMaker(job, in_training_process=self._seed is None)

    def _copies(self, lanes: Mapping[int, Lane]) -> dict[int, Job]:
        """Return a job for each lane: the first has the dataset, the others have copies of it."""
        jobs = dict.fromkeys(lanes, self._job)
        for place in [*lanes][1:]:
            try:
                jobs[place] = replace(self._job, dataset=copy.deepcopy(self._job.dataset))
            except Exception as error:
                raise StateError(
                    f"this state is of {len(lanes)} streams to a worker, and the dataset cannot be copied for each of "
                    f"them ({type(error).__name__}: {error}); go on with the number of workers that it was saved with"
                ) from error
        return jobs

    def _enter(self, place: int, lane: Lane, job: Job) -> None:
        """Have `lane` be the one that runs: with the random states that it has left, if there are others."""
        self._tell(lane, job)
        if self._seed is not None and (len(self._lanes) > 1 or not self._is_own(lane)):
            if self._current >= 0:
                self._states[self._current] = _states()
            if place in self._states:
                _set_states(self._states[place])
            else:
                self._seed(lane)
        self._current = place


def _states() -> Any:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _set_states(states: Any) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
