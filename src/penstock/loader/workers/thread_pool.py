"""A pool of threads, for datasets that release the GIL while they read and decode, and for free-threaded Python.

A batch that a thread has made is handed over as it is: the same objects. Only what the collate function has written to
a slot is described in an envelope, so that the slot is free when the last view of it dies.

Threads share the dataset, the process's random states and `get_worker_info()` (None), so no sample depends on the
thread that makes it: any free thread takes the next task. `worker_init_fn` is called in each thread before its first
task, one thread at a time while the training thread waits: so `get_worker_info()` can return that worker's during the
call, and the random states that it leaves can be dropped.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch._utils import ExceptionWrapper

from penstock.core import plain_tree
from penstock.core.random_states import keep_states
from penstock.core.shared_segment import PAGE, PrivateSegment, SharedSegment
from penstock.core.units import round_up
from penstock.loader.transport import codec
from penstock.loader.transport.arena import Arena
from penstock.loader.workers.messages import Result, Task
from penstock.loader.workers.pool import PoolSnapshot, WorkerCrash
from penstock.loader.workers.sample_seed import begin_worker_thread
from penstock.loader.workers.stream_shard import StreamShard, install_info
from penstock.loader.workers.thread_gate import ThreadGate
from penstock.loader.workers.worker import CancelledError, Worker
from penstock.loader.workers.worker_spec import WorkerSpec


def _wrap_exception(worker: int) -> ExceptionWrapper:
    return ExceptionWrapper(where=f"in DataLoader worker thread {worker}")


class _Tick:
    """Stops before a sample while the gate is closed, and abandons a batch whose epoch is over."""

    def __init__(self, task: Task, gate: ThreadGate) -> None:
        self._task = task
        self._gate = gate

    def __call__(self, row: int) -> None:
        if self._gate.is_closed:
            self._gate.pass_through()
        if self._task.cancelled:
            raise CancelledError

    def notes(self, first_row: int) -> Iterator[None]:
        return itertools.repeat(None)


class ThreadPool:
    """Worker threads of one loader; see `Pool` for the protocol.

    Args:
        worker_spec: what the workers do.
        workers: how many there are at first.
        base_seed: for what `get_worker_info().seed` returns in `worker_init_fn`. If that raises, it is the result of
            every task.
        pins: whether slots are page-locked: batches of tensors are then copied into them, wherever they were made.
    """

    def __init__(self, worker_spec: WorkerSpec, workers: int, *, base_seed: int = 0, pins: bool = False) -> None:
        self.size = workers
        self._pins = pins
        self.gate = ThreadGate()
        """Closed, it stops the threads between two samples."""
        self._base_seed = base_seed
        self._failure: ExceptionWrapper | None = None
        self.processes: list[Any] = []
        self._worker_spec = worker_spec
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        """Tasks that no thread has taken. None retires the thread that takes it."""
        self._finished: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._outstanding: dict[int, Task] = {}
        self._epoch: tuple[int, dict[int, StreamShard]] = (0, {})
        """Counts epochs, with the shards of each; threads read it before each task."""
        self._threads: list[threading.Thread] = []
        self._closed = False

    def start(self, shards: Sequence[StreamShard]) -> None:
        """Start the threads; an iterable dataset has one."""
        self._epoch = 0, dict(enumerate(shards))
        for _ in range(self.size):
            self._start_one()

    def _start_one(self) -> None:
        number = len(self._threads)
        is_set_up = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(number, is_set_up), name=f"penstock-worker-{number}", daemon=True
        )
        thread.start()
        self._threads.append(thread)
        if self._worker_spec.init_fn is not None:
            is_set_up.wait()

    def resize(self, workers: int) -> bool:
        """Start threads or retire some, until there are `workers`; a retired one finishes its task first."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for _ in range(self.size, workers):
            self._start_one()
        for _ in range(workers, self.size):
            self._queue.put(None)
        self.size = workers
        return True

    def is_ready(self, worker: int) -> bool:
        """Return True: threads start at once."""
        return True

    def has_effects(self) -> bool:
        """Return False: nobody looks for them."""
        return False

    def outstanding(self) -> int:
        """Return how many tasks were submitted and have not been collected."""
        return len(self._outstanding)

    def announce(self, number: int, segment: SharedSegment | None) -> None:
        """Do nothing: threads see all memory of their process."""

    def submit(self, task: Task) -> None:
        """Queue a task; never blocks."""
        self._outstanding[task.seq] = task
        self._queue.put(task)

    def replace(self, worker: int, shards: Sequence[StreamShard]) -> None:
        """Do nothing: a thread does not die alone."""

    def current_task(self, worker: int) -> tuple[Task | None, int]:
        """Return no task: which thread has which is not recorded."""
        return None, 0

    def collect(self, timeout_s: float | None) -> list[Result | WorkerCrash]:
        """Wait until something happens, at most `timeout_s` seconds, and return everything that has happened."""
        results: list[Result] = []
        try:
            results.append(self._finished.get(timeout=timeout_s))
            while True:
                results.append(self._finished.get_nowait())
        except queue.Empty:
            pass
        for result in results:
            result.task = self._outstanding.pop(result.seq)
        return [*results]

    def cancel(self, shards: Sequence[StreamShard] = (), *, finish: bool = False) -> list[Task]:
        """Cancel all tasks and begin a new epoch; return the tasks that no thread had taken. None is finished."""
        self._epoch = self._epoch[0] + 1, dict(enumerate(shards))
        untaken = []
        retirements = 0
        for task in self._outstanding.values():
            task.cancelled = True
        try:
            while True:
                task_or_none = self._queue.get_nowait()
                if task_or_none is None:
                    retirements += 1
                else:
                    untaken.append(self._outstanding.pop(task_or_none.seq))
        except queue.Empty:
            pass
        for _ in range(retirements):
            self._queue.put(None)
        return untaken

    def snapshot(self) -> PoolSnapshot:
        """Return what the threads do just now; see `Pool.snapshot`."""
        waiting, done = self._queue.qsize(), self._finished.qsize()
        tasks = [task for task in list(self._outstanding.values()) if not task.cancelled]
        tasks.sort(key=lambda task: task.seq)
        # Which tasks are finished is not recorded; the oldest nearly always are.
        return PoolSnapshot({*tasks[:done]}, working=max(0, min(self.size, len(tasks) - waiting - done)))

    def close(self) -> None:
        """Stop the threads after the samples they are making."""
        if self._closed:
            return
        self._closed = True
        self.cancel()
        self.gate.end()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # in which the last reference to the iterator may have died
                thread.join()

    # ── in a thread ─────────────────────────────────────────────────────────────────────────────────────────

    def _run(self, worker: int, is_set_up: threading.Event) -> None:
        begin_worker_thread()
        if self._worker_spec.init_fn is not None:
            self._set_up(worker, self._worker_spec.init_fn)
            is_set_up.set()
        where = f"in DataLoader worker thread {worker}"
        thread_worker = Worker(worker, where, self._encode, _enlarge, self._worker_spec)
        epoch = -1
        while (task := self._queue.get()) is not None:
            if self._failure is not None:
                result = Result(task.seq, worker, error=self._failure)
            else:
                self.gate.enter()
                try:
                    if epoch != self._epoch[0]:
                        epoch, shards = self._epoch
                        thread_worker.begin_epoch(shards)
                    result = thread_worker.run_task(task, _arena_of(task), tick=_Tick(task, self.gate))
                finally:
                    self.gate.leave()
            self._finished.put(result)
            del task, result

    def _set_up(self, worker: int, init_fn: Callable[[int], Any]) -> None:
        def install(workers: int) -> None:
            install_info(StreamShard(number=worker, of=workers), self._worker_spec, self._base_seed)

        self.gate.enter()
        try:
            with keep_states():
                install(self.size)
                init_fn(worker)
        except Exception:
            self._failure = self._failure or _wrap_exception(worker)
        finally:
            install(0)
            self.gate.leave()

    def _encode(self, batch: Any, arena: Arena) -> bytes | None:
        """Return the envelope of a batch of which parts are in its slot, or are to be; None of others."""
        is_in_slot = arena.used > 0 or (self._pins and plain_tree.describe(batch) is not None)
        return codec.encode(batch, arena) if is_in_slot else None


def _arena_of(task: Task) -> Arena:
    return Arena(np.empty(0, np.uint8) if task.slot is None else np.frombuffer(task.slot.memory, np.uint8))


def _enlarge(needed: int, result: Result) -> Arena:
    result.oversize = PrivateSegment(round_up(needed, PAGE))
    return Arena(np.frombuffer(result.oversize.memory, np.uint8))
