"""The protocol of a pool of workers: tasks in, results and crashes out.

`ProcessPool`, `ThreadPool` and `RayPool` implement it; `tests/support/fake_pool.py` has a synchronous double.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.core.shared_segment import SharedSegment
from penstock.loader.workers.messages import Result, Task
from penstock.loader.workers.stream_shard import StreamShard


@dataclass(frozen=True, slots=True)
class WorkerCrash:
    """A worker ended without being asked to."""

    worker: int
    pid: int
    cause: str
    """A clause, as in 'is killed by signal: Segmentation fault.'"""
    lost: Sequence[Task]
    """The tasks it had. None of them will produce a result."""
    task_at_fault: Task | None
    """The one of them that it was making."""
    row: int
    """The row of that task's batch that it was making."""
    is_retired: bool = False
    """It was leaving anyway, and needs no successor."""
    is_machine_failure: bool = False
    """Its machine is gone or unreachable, so neither a sample nor the way workers are started is to blame."""


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """What a pool's workers do at one moment."""

    finished: Collection[Task] = ()
    """Tasks that are finished and wait to be collected."""
    working: int = 0
    """Workers that make something."""
    starting: int = 0
    """Workers that have not begun their first task."""


class Pool(Protocol):
    """Several workers that make tasks.

    The scheduler (and the `ScalingPool` inside it) is the only caller. It calls everything but `snapshot` in the
    training process, from the thread that iterates, in this order: `start` once; `submit`, `collect`, `resize` and the
    others in any order; `cancel` between epochs; `close` once, or more often.

    After `start`, `submit` or `collect` has raised, the pool is in no defined state and only `close` may follow. A
    worker's failure never raises here: an exception in the dataset is a `Result` with an `error`, and a worker that
    died is a `WorkerCrash`, after which the caller must call `replace` unless `is_retired` is set.
    """

    size: int
    """How many workers there should be."""
    processes: list[Any]
    """Worker processes (`multiprocessing.Process`), by worker number; none for threads and for Ray."""

    def start(self, shards: Sequence[StreamShard]) -> None:
        """Start the workers. Shard i of an iterable dataset runs on worker i modulo `size`."""
        ...

    def resize(self, workers: int) -> bool:
        """Start workers or retire the last ones until there are `workers`.

        A retired worker finishes its task, and nobody waits for it. Returns False when its number is still in use and
        the call must be repeated later. Fewer workers are allowed only while any worker may make any task.
        """
        ...

    def is_ready(self, worker: int) -> bool:
        """Return whether a worker that was started has opened its dataset and takes tasks."""
        ...

    def has_effects(self) -> bool:
        """Return whether a sample is known to have left something in its worker that would be noticed in this process.

        See `lasting_effects`; only processes are looked at.
        """
        ...

    def outstanding(self) -> int:
        """Return how many tasks were submitted and have not been collected."""
        ...

    def announce(self, number: int, segment: SharedSegment | None) -> None:
        """Make a new segment known to every worker, or (None) let workers drop one. The ring calls it."""
        ...

    def submit(self, task: Task) -> None:
        """Queue a task; never blocks."""
        ...

    def collect(self, timeout_s: float | None) -> list[Result | WorkerCrash]:
        """Wait until something happens, at most `timeout_s` seconds, and return everything that has happened."""
        ...

    def replace(self, worker: int, shards: Sequence[StreamShard]) -> None:
        """Start a successor for a dead worker, with its share of the shards as they are now."""
        ...

    def current_task(self, worker: int) -> tuple[Task | None, int]:
        """Return the task that a worker makes and the row it has reached, as far as that is known."""
        ...

    def cancel(self, shards: Sequence[StreamShard], *, finish: bool) -> list[Task]:
        """Cancel all tasks and begin a new epoch with these shards; return the tasks that will never have a result.

        Args:
            shards: of an iterable dataset.
            finish: have the workers make their tasks nevertheless, because what they make next may depend on it.
        """
        ...

    def close(self) -> None:
        """Stop the workers and wait for them. Does nothing when called again, or in a process forked from the owner."""
        ...

    def snapshot(self) -> PoolSnapshot:
        """Return what the workers do just now. Any thread may call it; it takes no lock and changes nothing.

        Raises:
            RuntimeError, ValueError, IndexError: the pool changed or was closed meanwhile; try again later.
        """
        ...
