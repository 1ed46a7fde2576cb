"""What a worker process sets up before its first task, and keeps until its last.

It is the same on this machine (`process_main`) and on another (`cluster.actor`): seeds as torch gives them,
`get_worker_info()`, `worker_init_fn` and the opened dataset.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.random  # now, rather than in every worker: it takes 8 ms
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker
from torch.utils.data._utils.worker import _generate_state

from penstock.core.errors import UnpicklableError
from penstock.loader.collate import stack_in_slots
from penstock.loader.workers.batch_fetcher import BatchFetcher
from penstock.loader.workers.stream_shard import StreamShard, StreamShards, install_info
from penstock.loader.workers.worker_spec import Prefetch, WorkerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """Who a worker is."""

    worker: int
    workers: int
    base_seed: int
    shards: dict[int, StreamShard] = field(default_factory=dict)
    """Its shards of an iterable dataset, by their positions in the round."""
    epoch: int | None = None
    """The pass of a stream in which the predecessor died; the pickled spec may be of an earlier one."""
    is_watched: bool = False
    """Whether it is to be found out if the training process could make its samples unnoticed; see `lasting_effects`."""


_settle_workers: Callable[[], int] | None = None
"""In a worker process that does not know yet how many workers there will be: returns the number, and settles it."""


_is_info_read = False


class UnsettledInfo(worker.WorkerInfo):
    """What `get_worker_info()` returns while the number of workers is not settled: it is, when anything asks for it.

    All attributes count as asking, but those that do not depend on the number.
    """

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        global _settle_workers, _is_info_read
        _is_info_read = True
        if _settle_workers is not None and name not in ("id", "seed", "dataset"):
            settle, _settle_workers = _settle_workers, None
            object.__setattr__(self, "num_workers", settle())
        return super().__getattribute__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled as torch's own."""
        own = {name: getattr(self, name) for name in ("id", "num_workers", "seed", "dataset")}
        return functools.partial(worker.WorkerInfo, **own), ()


UnsettledInfo.__name__ = UnsettledInfo.__qualname__ = "WorkerInfo"


def is_info_read() -> bool:
    """Return whether anything has been read of what `get_worker_info()` returns, in a worker that is watched."""
    return _is_info_read


def _install_unsettled(settle_workers: Callable[[], int] | None) -> None:
    """Have `get_worker_info()` find out how many workers there are only when that is asked for.

    Without `settle_workers` that is known, and it is only noted that something was asked for.
    """
    global _settle_workers
    info: Any = worker.get_worker_info()
    worker._worker_info = UnsettledInfo(id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=info.dataset)
    _settle_workers = settle_workers


class WorkerContext:
    """One worker's dataset and its fetchers. A failure to set it up is kept, and is the result of every task.

    Args:
        options: who the worker is.
        open_worker_spec: returns the spec; called once, after the random states are seeded.
        where: for the text of an exception, as in "in DataLoader worker process 0".
        dumps: pickles what travels to the training process; raises if it cannot.
        settle_workers: where the number of workers is not settled yet, returns it, and settles it by that.
    """

    def __init__(
        self,
        options: WorkerOptions,
        open_worker_spec: Callable[[], WorkerSpec],
        *,
        where: str,
        dumps: Callable[[Any], Any],
        settle_workers: Callable[[], int] | None = None,
    ) -> None:
        self._options = options
        self._where = where
        self._dumps = dumps
        self._shards: StreamShards | None = None
        self._failure: ExceptionWrapper | None = None
        self.prefetch: Prefetch | None = None
        """How the remote files of a batch are requested ahead; None for most datasets, and where set-up has failed."""
        torch.set_num_threads(1)
        own = StreamShard(number=options.worker, of=options.workers)
        self._seed(own)
        stack_in_slots()
        try:
            worker_spec = open_worker_spec()
            if options.epoch is not None:
                worker_spec.dataset.set_epoch(options.epoch)
            install = functools.partial(install_info, base_seed=options.base_seed)
            install(own, worker_spec)
            if settle_workers is not None or options.is_watched:
                _install_unsettled(settle_workers)
            if worker_spec.init_fn is not None:
                worker_spec.init_fn(options.worker)
            self._shards = StreamShards(worker_spec, options.shards, install, seed=self._seed, own=own)
            self.prefetch = worker_spec.prefetch
        except Exception:
            self._failure = self.wrap_exception()

    def _seed(self, shard: StreamShard) -> None:
        base_seed = self._options.base_seed
        random.seed(base_seed + shard.number)
        _seed_torch(base_seed + shard.number)
        np.random.seed(_generate_state(base_seed, shard.number))

    def fetcher(self, shard: int) -> BatchFetcher | None:
        """Return the fetcher of a shard (0 for map-style datasets); None if it could not be begun."""
        return self._shards.fetcher(shard) if self._shards is not None else None

    def begin_epoch(self, shards: dict[int, StreamShard]) -> None:
        """Begin a new epoch of an iterable dataset."""
        if self._shards is None:
            return
        try:
            self._shards.begin(shards)
        except Exception:
            self._failure = self.wrap_exception()

    def state(self, fetcher: BatchFetcher, *, ended: bool) -> bytes:
        """Return where a shard is, pickled; empty if its dataset keeps no state, or none that can be pickled.

        Raises:
            Exception: what a map-style dataset raises that keeps a state; none of its batches can be made again.
        """
        if not fetcher.worker_spec.iterable:
            return bytes(self._dumps(fetcher.samples.stream_state()))
        try:
            state = fetcher.samples.end_state() if ended else fetcher.samples.stream_state()
            return b"" if state is None else self._dumps(state)
        except Exception:  # the batches since the last state are then made again
            return b""

    def take_failure(self) -> ExceptionWrapper | None:
        """Return why the worker could not be set up, each time; or why its epoch could not begin, once; else None."""
        failure = self._failure
        if self._shards is not None:
            self._failure = None
        return failure

    def wrap_exception(self) -> ExceptionWrapper:
        """Return the exception being handled in a form that can be pickled, with its traceback as text."""
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
