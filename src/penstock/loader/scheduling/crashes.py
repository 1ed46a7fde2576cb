"""Counts worker crashes: which sample is at fault, and whether it has crashed too many workers to be tried again."""

from __future__ import annotations

from collections import Counter
from typing import Any

from penstock.core.errors import WorkerKilledError, WorkerStartError
from penstock.data.source import Source
from penstock.data.stream import Stream
from penstock.loader.workers.messages import Task
from penstock.loader.workers.pool import WorkerCrash
from penstock.loader.workers.worker_spec import WorkerSpec

_MAX_STARTUP_CRASHES = 3


class CrashCounter:
    """Counts the crashes of one loader's workers.

    Args:
        worker_spec: what the workers do.
        most: a sample on which this many workers have crashed is quarantined.
    """

    def __init__(self, worker_spec: WorkerSpec, most: int) -> None:
        self.most = most
        self._worker_spec = worker_spec
        self._crashes: Counter[Any] = Counter()
        self._startup_crashes = 0

    def reset_startup_count(self) -> None:
        """Note that a worker has made something: workers can start."""
        self._startup_crashes = 0

    def count_startup_crash(self, crash: WorkerCrash) -> None:
        """Count a worker that died without a task.

        Raises:
            WorkerStartError: too many in a row have not reached their first task.
        """
        self._startup_crashes += 1
        if self._startup_crashes >= _MAX_STARTUP_CRASHES:
            raise WorkerStartError(
                f"DataLoader worker (pid {crash.pid}) {crash.cause} {self._startup_crashes} workers have ended like "
                "this before they made anything; look above for what they printed, and check that the machine has "
                "memory for num_workers processes"
            )

    def count_stream_crash(self, crash: WorkerCrash, shard: int, batch: int) -> None:
        """Count a crash on a batch of a shard of an iterable dataset.

        Raises:
            WorkerKilledError: the batch has crashed too many workers, and a stream cannot skip it.
        """
        self._crashes[shard, batch] += 1
        if self._crashes[shard, batch] >= self.most:
            raise WorkerKilledError(
                f"DataLoader worker (pid {crash.pid}) {crash.cause} {self.most} workers have died on batch {batch} "
                f"of this epoch, in the stream of worker {shard}{self._path_of(batch)}; an iterable dataset cannot be "
                "read around it"
            )

    def should_quarantine(self, task: Task, crash: WorkerCrash) -> bool:
        """Count a crash on a sample; return whether the sample must not be tried again."""
        if self._worker_spec.iterable:
            return False
        key = repr(self.sample_at_fault(task, crash.row))
        self._crashes[key] += 1
        return self._crashes[key] >= self.most

    def sample_at_fault(self, task: Task, row: int) -> Any:
        """Return the index that was being made: one sample's, or all indices of a batch made in one call."""
        if not self._worker_spec.auto_collation or self._worker_spec.makes_whole_batches:
            return task.indices
        return task.indices[min(row, len(task.indices) - 1)]

    def quarantine_error(self, index: Any, crash: WorkerCrash) -> WorkerKilledError:
        """Return the error that is raised in place of a quarantined sample."""
        place = self._path_of(index)
        return WorkerKilledError(
            f"DataLoader worker (pid {crash.pid}) {crash.cause} It was making sample {index!r}{place}, on which "
            f"{self.most} workers have died. Look at that sample (out of memory? a crash in its decoder?), "
            "or pass errors='skip' to leave such samples out"
        )

    def _path_of(self, index: Any) -> str:
        """Return which file of one of our sources it was, as a clause."""
        dataset = self._worker_spec.dataset
        if not isinstance(dataset, Source | Stream):
            return ""
        try:
            return f" of {dataset.path_of(index)}" if isinstance(dataset, Source) else f" of {dataset.where}"
        except Exception:  # noqa: BLE001  all indices of a batch, or no index at all
            return f" of {dataset.where}"
