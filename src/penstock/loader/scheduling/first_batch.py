"""Chooses the number of workers of a first epoch in which it must not change: by the first batch.

    worker 0 makes batch 0 ──▶ how long did it take, and how much of that on a core? ──▶ n workers ──▶ batches 1, 2, ...

Batch 0 is worker 0's however many there are, and their number cannot change it, unless somebody asks for it
(`get_worker_info().num_workers`). Then the guess from before counts: it is settled when it is asked for. So the batches
are torch's for the number that is chosen, and none is made twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.host import available_nbytes, private_nbytes
from penstock.loader.scheduling.auto_workers import AutoWorkers
from penstock.loader.scheduling.batch import Batch
from penstock.loader.workers.busy_time import busy_part, process_times

if TYPE_CHECKING:
    from penstock.loader.workers.process_pool import ProcessPool  # imports what only some systems have


class FirstBatch:
    """Chooses the number of workers while there is one.

    Args:
        pool: with that worker.
        auto: the loader's.
        batches: how many the epoch has.
        prefetch_factor: how many batches are made ahead for each worker.
    """

    def __init__(self, pool: ProcessPool, auto: AutoWorkers, *, batches: int, prefetch_factor: int) -> None:
        self._pool = pool
        self._auto = auto
        self._batches = batches
        self._prefetch_factor = prefetch_factor

    def choose(self, batch: Batch | None, passed_ns: int, *, has_crashed: bool) -> int:
        """Return how many workers the epoch has.

        Args:
            batch: the first; None if there is none.
            passed_ns: since it was sent.
            has_crashed: whether a worker has died at it.
        """
        cost = None if batch is None or has_crashed or batch.error is not None else self._cost(batch, passed_ns)
        if cost is not None and batch is not None:
            self._auto.plan_first(*cost, batches=self._batches, most=self._most_in_memory(batch.result.nbytes))
        return self._plan()

    def limit(self, workers: int) -> bool:
        """Have only so many workers, because the system starts no more; return whether that is still possible."""
        self._auto.limit(workers, "the system starts no more")
        return self._plan() == workers

    def settle(self) -> None:
        """Have the workers know how many they are."""
        self._pool.settle_workers()

    def _plan(self) -> int:
        planned = self._pool.plan_workers(self._auto.workers)
        if planned != self._auto.workers:
            self._auto.workers, self._auto.reason = planned, "a guess, and the dataset has asked for it"
        return planned

    def _cost(self, batch: Batch, passed_ns: int) -> tuple[int, int] | None:
        """Return how long the batch takes, and how much of that is computing; None if nobody knows."""
        if batch.tasks_left == 0:
            return batch.work_ns, batch.result.busy_ns
        pid = self._pool.processes[0].pid
        times = process_times(pid or 0)
        if times is None or not self._pool.is_ready(0):
            return None
        _, row = self._pool.current_task(0)
        work_ns = passed_ns * max(1, len(batch.indices) if hasattr(batch.indices, "__len__") else 1) // max(1, row)
        return work_ns, work_ns * busy_part(passed_ns, *times) // max(1, passed_ns)

    def _most_in_memory(self, batch_nbytes: int) -> int:
        own = private_nbytes(self._pool.processes[0].pid or 0) or 0
        # Workers write to pages that were shared at their start: each comes to twice what the first has after a batch.
        needed = 2 * own + self._prefetch_factor * batch_nbytes
        return available_nbytes() // 4 // max(1, needed)  # a quarter of what is free
