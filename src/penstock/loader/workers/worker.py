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
from penstock.loader.collate import set_current_arena, stack_in_slots
from penstock.loader.transport import codec
from penstock.loader.transport.arena import Arena, ArenaFullError
from penstock.loader.workers.fetcher import BatchFetcher, Tick
from penstock.loader.workers.messages import Result, Task
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
    is_settled: bool = True
    """Whether `workers` is how many there are; else the control page has that number, and asking settles it."""
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


class CancelledError(Exception):
    """The epoch of this task is over; a `Tick` raises it."""


Enlarge = Callable[[int, Result], Arena]
"""Returns an arena of so many bytes, when a slot is too small; the result gets the segment, if it lies in one."""

Encode = Callable[[Any, Arena], bytes | None]
"""Returns the envelope of a batch; None where the batch itself is handed over."""


class Worker:
    """One worker's datasets and fetchers. A failure to set it up is kept, and is the result of every task.

    Args:
        number: of the worker.
        where: for the text of an exception, as in "in DataLoader worker process 0".
        encode: see `Encode`.
        enlarge: see `Enlarge`.
        worker_spec: what it does, where it has the dataset of the training process; `begin_epoch` then sets it up.
    """

    def __init__(
        self, number: int, where: str, encode: Encode, enlarge: Enlarge, worker_spec: WorkerSpec | None = None
    ) -> None:
        self.number = number
        self.shards: StreamShards | None = None
        self._worker_spec = worker_spec
        self._where = where
        self._encode = encode
        self._enlarge = enlarge
        self._failure: ExceptionWrapper | None = None

    def run_task(self, task: Task, arena: Arena, *, tick: Tick | None = None, prefetched: Any = None) -> Result:
        """Make the batch of a task, in `arena` where that pays; what fails is in the result.

        Args:
            task: which.
            arena: of its slot; empty without one.
            tick: told which row is made; may raise a `CancelledError`.
            prefetched: entered while the samples are made.
        """
        result = Result(task.seq, self.number)
        try:
            if (failure := self._take_failure()) is not None:
                result.error = failure
            elif (fetcher := self.fetcher(task.shard)) is None:
                result.ended = True
            else:
                self._make(fetcher, task, arena, result, tick, prefetched)
        except Exception as error:
            _close_oversize(result)
            result = Result(task.seq, self.number)
            if isinstance(error, CancelledError):
                result.cancelled = True
            else:
                result.error = self.wrap_exception()
        return result

    def _make(
        self, fetcher: BatchFetcher, task: Task, arena: Arena, result: Result, tick: Tick | None, prefetched: Any
    ) -> None:
        enlarge = functools.partial(self._enlarged, result)
        seed = task.epoch_seed
        fetcher.make(
            task.indices, arena, result=result, epoch_seed=seed, tick=tick, enlarge=enlarge, prefetched=prefetched
        )
        if (task.wants_state and not result.empty) or result.ended:
            result.state = self.state(fetcher, ended=result.ended)
        assert result.arena is not None
        if not (result.ended or result.empty):
            try:
                result.envelope = self._encode(result.batch, result.arena)
            except ArenaFullError as error:
                result.envelope = self._encode(result.batch, enlarge(error.needed))
            result.nbytes = result.arena.used
            result.is_batch = result.envelope is None
            if not result.is_batch:
                result.batch = None
            if result.envelope is None or codec.is_inline(result.envelope):
                _close_oversize(result)
        result.arena = None

    def _enlarged(self, result: Result, needed: int) -> Arena:
        _close_oversize(result)
        result.arena = arena = self._enlarge(needed, result)
        return arena

    def fetcher(self, shard: int) -> BatchFetcher | None:
        """Return the fetcher of a shard (0 for map-style datasets); None if it could not be begun."""
        return self.shards.fetcher(shard) if self.shards is not None else None

    def begin_epoch(self, shards: dict[int, StreamShard]) -> None:
        """Begin a new epoch of an iterable dataset."""
        try:
            if self.shards is not None:
                self.shards.begin(shards)
            elif self._worker_spec is not None:
                self.shards = StreamShards(self._worker_spec, shards, lambda shard, worker_spec: None)
        except Exception:
            self._failure = self.wrap_exception()

    def state(self, fetcher: BatchFetcher, *, ended: bool) -> Any:
        """Return where a shard is; None if its dataset keeps no state."""
        return fetcher.samples.end_state() if ended else fetcher.samples.stream_state()

    def _take_failure(self) -> ExceptionWrapper | None:
        """Return why the worker could not be set up, each time; or why its epoch could not begin, once; else None."""
        failure = self._failure
        if self.shards is not None:
            self._failure = None
        return failure

    def wrap_exception(self) -> ExceptionWrapper:
        """Return the exception being handled, as its traceback's text."""
        return ExceptionWrapper(where=self._where)


def _close_oversize(result: Result) -> None:
    if result.oversize is not None:
        result.oversize.close()
        result.oversize = None


class ProcessWorker(Worker):
    """A worker that has a process to itself, whose results travel.

    Args:
        options: who the worker is.
        open_worker_spec: returns the spec; called once, after the random states are seeded.
        where: as of `Worker`, and so are `encode` and `enlarge`.
        dumps: pickles what travels to the training process; raises if it cannot.
        settle_workers: where the number of workers is not settled yet, returns it, and settles it by that.
    """

    def __init__(
        self,
        options: WorkerOptions,
        open_worker_spec: Callable[[], WorkerSpec],
        *,
        where: str,
        encode: Encode,
        enlarge: Enlarge,
        dumps: Callable[[Any], Any],
        settle_workers: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(options.worker, where, encode, enlarge)
        self._options = options
        self._dumps = dumps
        self.prefetch: Prefetch | None = None
        """How the remote files of a batch are requested ahead; None for most datasets, and where set-up has failed."""
        torch.set_num_threads(1)
        own = StreamShard(number=options.worker, of=options.workers)
        self._seed(own)
        stack_in_slots()
        try:
            worker_spec = open_worker_spec()
            install = functools.partial(install_info, base_seed=options.base_seed)
            install(own, worker_spec)
            if settle_workers is not None or options.is_watched:
                _install_unsettled(settle_workers)
            if worker_spec.init_fn is not None:
                worker_spec.init_fn(options.worker)
            self.shards = StreamShards(worker_spec, options.shards, install, seed=self._seed, own=own)
            self.prefetch = worker_spec.prefetch
        except Exception:
            self._failure = self.wrap_exception()

    def run_task(self, task: Task, arena: Arena, *, tick: Tick | None = None, prefetched: Any = None) -> Result:
        """Make the batch of a task; a `default_collate` that the user's function calls stacks in its arena, too."""
        set_current_arena(arena)
        try:
            return super().run_task(task, arena, tick=tick, prefetched=prefetched)
        finally:
            set_current_arena(None)

    def _seed(self, shard: StreamShard) -> None:
        base_seed = self._options.base_seed
        random.seed(base_seed + shard.number)
        _seed_torch(base_seed + shard.number)
        np.random.seed(_generate_state(base_seed, shard.number))

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
