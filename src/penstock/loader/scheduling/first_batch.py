"""Chooses the number of workers of a first epoch in which it must not change: by the first batch.

    worker 0 makes batch 0 ──▶ how long did it take, and how much of that on a core? ──▶ n workers ──▶ batches 1, 2, ...

Batch 0 is worker 0's however many there are, and their number cannot change it, unless somebody asks for it
(`get_worker_info().num_workers`). Then the guess from before counts: it is settled when it is asked for. So the batches
are torch's for the number that is chosen, and none is made twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.host import available_nbytes, private_nbytes
from penstock.loader.scheduling.autoscale import AutoscalePolicy
from penstock.loader.scheduling.batch import Batch
from penstock.loader.workers.busy_time import busy_part, process_times

if TYPE_CHECKING:
    from penstock.loader.workers.process_pool import ProcessPool  # imports what only some systems have

WAIT_S = 0.5
"""How long the first batch is waited for. Then what its worker has done so far decides."""

_KNOWN_STARTS = 4
"""After so many starts of workers it is known how long one takes."""

_GROWTH = 2
"""Workers write to pages that were shared at their start, so each will take this multiple of what the first one has."""

_MEMORY_SHARE = 4
"""Workers and the batches made ahead may take this fraction of the available memory (one in ...)."""


class FirstBatch:
    """Chooses the number of workers while there is one.

    Args:
        pool: with that worker.
        policy: of the loader.
        batches: how many the epoch has; None where nobody knows.
        prefetch_factor: how many batches are made ahead for each worker.
    """

    def __init__(
        self, pool: ProcessPool, policy: AutoscalePolicy, *, batches: int | None, prefetch_factor: int
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._batches = batches
        self._prefetch_factor = prefetch_factor
        self._first: tuple[int, int, int] | None = None
        """How long the first batch took, how much of that was computing, and how many workers the memory holds."""
        self._starts_ns: list[int] = []

    def choose(self, batch: Batch | None, passed_ns: int, *, has_crashed: bool) -> int:
        """Return how many workers the epoch has; the policy keeps it.

        Args:
            batch: the first; None if there is none.
            passed_ns: since it was sent.
            has_crashed: whether a worker has died at it.
        """
        cost = None if batch is None or has_crashed or batch.error is not None else self._cost(batch, passed_ns)
        if cost is not None and batch is not None:
            self._first = *cost, self._most_in_memory(batch.nbytes)
        return self._choose(1)

    def choose_again(self, start_ns: int) -> int:
        """Return how many workers the epoch has, after one more was started, which took `start_ns`."""
        self._starts_ns.append(start_ns)
        if len(self._starts_ns) >= _KNOWN_STARTS:
            self._policy.limits.start_ns = sum(self._starts_ns) // len(self._starts_ns)
        return self._choose(self._pool.size)

    def _choose(self, present: int) -> int:
        if self._first is not None:
            work_ns, busy_ns, most = self._first
            self._policy.epochs.plan_first(work_ns, busy_ns, batches=self._batches, most=most)
        self._policy.epochs.workers = max(present, self._policy.epochs.workers)
        return self._plan(self._policy.epochs.workers)

    def limit(self, workers: int) -> bool:
        """Have only so many workers, because the system starts no more; return whether that is still possible."""
        self._policy.limit(workers, "the system starts no more")
        self._policy.epochs.workers, self._policy.epochs.reason = workers, self._policy.reason
        return self._plan(workers) == workers

    def settle(self) -> None:
        """Have the workers know how many they are."""
        self._pool.settle_workers()

    def _plan(self, workers: int) -> int:
        planned = self._pool.plan_workers(workers)
        if planned != workers:
            self._policy.epochs.workers, self._policy.epochs.reason = (
                planned,
                "a guess, and the dataset has asked for it",
            )
        return planned

    def _cost(self, batch: Batch, passed_ns: int) -> tuple[int, int] | None:
        """Return how long the batch takes, and how much of that is computing; None if nobody knows."""
        if batch.tasks_left == 0:
            return batch.work_ns, batch.busy_ns
        pid = self._pool.processes[0].pid
        times = process_times(pid or 0)
        if times is None or not self._pool.is_ready(0):
            return None
        _, row = self._pool.current_task(0)
        work_ns = passed_ns * max(1, len(batch.indices) if hasattr(batch.indices, "__len__") else 1) // max(1, row)
        return work_ns, work_ns * busy_part(passed_ns, *times) // max(1, passed_ns)

    def _most_in_memory(self, batch_nbytes: int) -> int:
        own = private_nbytes(self._pool.processes[0].pid or 0) or 0
        needed = _GROWTH * own + self._prefetch_factor * batch_nbytes
        return available_nbytes() // _MEMORY_SHARE // max(1, needed)
