"""The workshop: what a worker of its own process sets up before its first piece, and keeps until its last.

It is the same wherever the process runs, on this machine (`child`) or on another (`ray_actor`): seeds as torch gives
them, `get_worker_info()`, `worker_init_fn`, the dataset opened, the witness watching.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.random  # now, rather than in every worker: it takes 8 ms
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.worker import WorkerInfo, _generate_state

from penstock.core.errors import UnpicklableError
from penstock.feed.collate import stack_in_slots
from penstock.feed.workers.lanes import Lane, Lanes
from penstock.feed.workers.maker import BatchMaker, Job
from penstock.feed.workers.witness import Witness, install_info


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """Who a worker is."""

    worker: int
    workers: int
    base_seed: int
    init_fn: Callable[[int], Any] | None
    watch: bool
    """Whether to look out for samples that can tell their worker; see `witness`."""
    lanes: dict[int, Lane] = field(default_factory=dict)
    """Its shares of an iterable dataset, by their places in the round."""
    epoch: int | None = None
    """The pass of a stream in which the predecessor died; the job may be of an earlier one."""


class Workshop:
    """One worker's dataset and what makes batches of it. A failure to set it up is kept, and told with the first piece.

    Args:
        options: who the worker is.
        open_job: returns the job; called once, after the random states are seeded.
        where: words for an exception's text, as in "in DataLoader worker process 0".
        dumps: pickles what has to travel to the training process; raises when it cannot.
    """

    def __init__(
        self, options: WorkerOptions, open_job: Callable[[], Job], *, where: str, dumps: Callable[[Any], Any]
    ) -> None:
        self._options = options
        self._where = where
        self._dumps = dumps
        self._lanes: Lanes | None = None
        self._witness: Witness | None = None
        self._first_states: Any = None
        self.broken: ExceptionWrapper | None = None
        torch.set_num_threads(1)
        own = Lane(number=options.worker, of=options.workers)
        self._seed(own)
        stack_in_slots()
        try:
            job = open_job()
            if options.epoch is not None:
                job.dataset.set_epoch(options.epoch)
            if options.watch:
                self._witness = Witness()
            self._tell(own, job)
            if options.init_fn is not None:
                options.init_fn(options.worker)
            self._lanes = Lanes(job, options.lanes, self._tell, seed=self._seed, init=options.init_fn, own=own)
        except Exception:
            self.broken = self.wrap_exception()
        if self._witness is not None:
            self._first_states = self._witness.remember()
            self._witness.evidence()

    def _seed(self, lane: Lane) -> None:
        base_seed = self._options.base_seed
        random.seed(base_seed + lane.number)
        _seed_torch(base_seed + lane.number)
        np.random.seed(_generate_state(base_seed, lane.number))

    def _tell(self, lane: Lane, job: Job) -> None:
        """Have `get_worker_info()` return which worker this is; for a lane, the one whose stream it is."""
        if not lane.of:
            install_info(None)
            return
        seed = self._options.base_seed + lane.number
        info: Any = WorkerInfo(id=lane.number, num_workers=lane.of, seed=seed, dataset=job.dataset)
        install_info(info if self._witness is None else self._witness.watched(info))

    def maker(self, lane: int) -> BatchMaker | None:
        """Return who makes batches of a lane (0 for map-style datasets); None if it could not be begun."""
        return self._lanes.maker(lane) if self._lanes is not None else None

    def begin_epoch(self, lanes: dict[int, Lane]) -> None:
        """Begin a new epoch: an iterable dataset is iterated anew."""
        if self._lanes is None:
            return
        try:
            self._lanes.begin(lanes)
        except Exception:
            self.broken = self.wrap_exception()

    def state(self, maker: BatchMaker, *, ended: bool) -> bytes:
        """Return where a lane is, pickled; nothing where its dataset cannot tell, or not in a form that travels."""
        try:
            state = maker.end_state() if ended else maker.snapshot()
            return b"" if state is None else self._dumps(state)
        except Exception:  # the batches since the last state are then made again
            return b""

    def take_failure(self) -> ExceptionWrapper | None:
        """Return why there is nothing to work with, once; None when there is, or when it has been said."""
        broken, self.broken = self.broken, None
        return broken

    def evidence(self) -> str:
        """Return what gave the worker away since the last call, or an empty string."""
        return self._witness.evidence() if self._witness is not None else ""

    def rewind(self) -> None:
        """Put the random states back to where they were before the first piece."""
        if self._witness is not None:
            self._witness.rewind(self._first_states)

    def wrap_exception(self) -> ExceptionWrapper:
        """Return the exception being handled as one that can travel, with its traceback as text."""
        wrapper = ExceptionWrapper(where=self._where)
        try:
            self._dumps(wrapper)
        except Exception:  # an exception type made in a function, say: keep its name and text
            wrapper.exc_type = UnpicklableError if issubclass(wrapper.exc_type, UnpicklableError) else RuntimeError
        return wrapper


def _seed_torch(seed: int) -> None:
    """Do what `torch.manual_seed` does, which takes milliseconds to prepare the seed of an absent accelerator."""
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
