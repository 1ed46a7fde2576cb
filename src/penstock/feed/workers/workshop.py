"""The workshop: what a worker of its own process sets up before its first piece, and keeps until its last.

It is the same wherever the process runs, on this machine (`child`) or on another (`ray_actor`): seeds as torch gives
them, `get_worker_info()`, `worker_init_fn`, the dataset opened, the witness watching.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.random  # now, rather than in every worker: it takes 8 ms
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.worker import WorkerInfo, _generate_state

from penstock.core.errors import UnpicklableError
from penstock.feed.collate import stack_in_slots
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
    replay_sizes: tuple[int, ...] = ()
    """Sizes of the batches of an iterable dataset that this worker's dead predecessor has delivered already."""
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
        self._where = where
        self._dumps = dumps
        self._witness: Witness | None = None
        self._first_states: Any = None
        self.maker: BatchMaker | None = None
        self.broken: ExceptionWrapper | None = None
        torch.set_num_threads(1)
        seed = options.base_seed + options.worker
        random.seed(seed)
        _seed_torch(seed)
        np.random.seed(_generate_state(options.base_seed, options.worker))
        stack_in_slots()
        try:
            job = open_job()
            if options.epoch is not None:
                job.dataset.set_epoch(options.epoch)
            info: Any = WorkerInfo(id=options.worker, num_workers=options.workers, seed=seed, dataset=job.dataset)
            if options.watch:
                self._witness = Witness()
                info = self._witness.watched(info)
            install_info(info)
            if options.init_fn is not None:
                options.init_fn(options.worker)
            self.maker = BatchMaker(job)
            for size in options.replay_sizes:
                self.maker.make(range(size), None)
        except Exception:
            self.broken = self.wrap_exception()
        if self._witness is not None:
            self._first_states = self._witness.remember()
            self._witness.evidence()

    def begin_epoch(self) -> None:
        """Begin a new epoch: an iterable dataset is iterated anew."""
        if self.maker is None:
            return
        try:
            self.maker.restart()
        except Exception:
            self.broken = self.wrap_exception()

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
