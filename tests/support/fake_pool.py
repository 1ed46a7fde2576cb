"""A pool without processes or threads, for tests of the scheduler: `collect` makes the tasks itself, one at a time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.shared_segment import PAGE, PrivateSegment, SharedSegment
from penstock.core.units import round_up
from penstock.loader.transport import codec
from penstock.loader.transport.arena import Arena
from penstock.loader.workers.messages import Result, Task
from penstock.loader.workers.pool import PoolSnapshot, WorkerCrash
from penstock.loader.workers.stream_shard import StreamShard
from penstock.loader.workers.worker import Worker
from penstock.loader.workers.worker_spec import WorkerSpec


class FakePool:
    """Makes the oldest task whenever results are collected; see `Pool` for the protocol.

    Args:
        worker_spec: what its workers do.
        workers: how many there are.
        crash_on: numbers of samples, each with how often a worker crashes on it.
        silent: whether nothing ever comes back, as from workers that hang.
    """

    def __init__(
        self, worker_spec: WorkerSpec, workers: int = 2, *, crash_on: dict[int, int] | None = None, silent: bool = False
    ) -> None:
        self.size = workers
        self.processes: list[Any] = []
        self.replaced: list[int] = []
        """The workers that `replace` was called for."""
        self.calls: list[str] = []
        """The names of the methods that begin and end something, in the order in which they were called."""
        self._crash_on = Counter(crash_on or {})
        self._silent = silent
        self._worker = Worker(0, "in the fake pool", codec.encode, _enlarge, worker_spec)
        self._worker.begin_epoch({})
        self._tasks: deque[Task] = deque()

    def start(self, shards: Sequence[StreamShard]) -> None:
        self.calls.append("start")

    def resize(self, workers: int) -> bool:
        self.size = workers
        return True

    def is_ready(self, worker: int) -> bool:
        return True

    def has_effects(self) -> bool:
        return False

    def outstanding(self) -> int:
        return len(self._tasks)

    def announce(self, number: int, segment: SharedSegment | None) -> None:
        pass

    def submit(self, task: Task) -> None:
        self._tasks.append(task)

    def collect(self, timeout_s: float | None) -> list[Result | WorkerCrash]:
        if not self._tasks or self._silent:
            return []
        task = self._tasks.popleft()
        worker = task.worker or 0
        for row, index in enumerate(task.indices):
            if self._crash_on[index] > 0:
                self._crash_on[index] -= 1
                return [WorkerCrash(worker, 1, "is killed by the test.", [task], task, row)]
        return [self._make(task, worker)]

    def _make(self, task: Task, worker: int) -> Result:
        assert task.slot is not None
        result = self._worker.run_task(task, Arena(np.frombuffer(task.slot.memory, np.uint8)))
        result.worker, result.task = worker, task
        return result

    def replace(self, worker: int, shards: Sequence[StreamShard]) -> None:
        self.replaced.append(worker)

    def current_task(self, worker: int) -> tuple[Task | None, int]:
        return (self._tasks[0] if self._tasks else None), 0

    def cancel(self, shards: Sequence[StreamShard], *, finish: bool) -> list[Task]:
        self.calls.append("cancel")
        untaken = [*self._tasks]
        self._tasks.clear()
        return untaken

    def close(self) -> None:
        self.calls.append("close")

    def snapshot(self) -> PoolSnapshot:
        return PoolSnapshot(working=min(self.size, len(self._tasks)))


def _enlarge(needed: int, result: Result) -> Arena:
    result.oversize = PrivateSegment(round_up(needed, PAGE))
    return Arena(np.frombuffer(result.oversize.memory, np.uint8))
