"""A pool whose number of workers follows `AutoWorkers`, or stays what it is.

Nothing that is under way is disturbed: a retired worker finishes its task first, and a new one takes the next task.

Where the number must not change within an epoch, the first epoch's is chosen by the first batch:

    worker 0 makes batch 0 ──▶ how long did it take, and how much of that on a core? ──▶ n workers ──▶ batches 1, 2, ...

Batch 0 is worker 0's however many there are, and their number cannot change it, unless somebody asks for it
(`get_worker_info().num_workers`). Then the guess from before counts: it is settled when it is asked for. So the batches
are torch's for the number that is chosen, and none is made twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.core.errors import TransportError, WorkerStartError
from penstock.core.host import available_nbytes, private_nbytes
from penstock.loader.counters import Counters
from penstock.loader.scheduling.auto_workers import LEAST_NBYTES, AutoWorkers, BatchTiming
from penstock.loader.scheduling.batch import Batch
from penstock.loader.scheduling.dispatch import Dispatch
from penstock.loader.workers.busy_time import busy_part, process_times
from penstock.loader.workers.pool import Pool

if TYPE_CHECKING:
    from penstock.loader.workers.process_pool import ProcessPool  # imports what only some systems have


class ScalingPool:
    """Keeps a pool at the number of workers that `auto` wants; without it, at the number it has.

    The scheduler calls all methods, in the thread that iterates: `begin_epoch` for each epoch, `handed_out` for each
    batch.
    """

    def __init__(self, *, pool: Pool, dispatch: Dispatch, counters: Counters, auto: AutoWorkers | None) -> None:
        self._pool = pool
        self._dispatch = dispatch
        self._counters = counters
        self._auto = auto
        self._new: set[int] = set()
        """Workers that were started and are not ready yet."""
        self._times_ns: tuple[int, int, int] | None = None
        """Step, handling and wait, as counted when the last batch was handed out."""
        self._is_behind = False
        """Whether the pool has to be resized again, because it could not follow at once."""
        self.report_workers()

    def begin_epoch(self) -> None:
        """Begin an epoch: the pipeline is empty, so that what its first batch waits for tells nothing."""
        self._times_ns = None

    def handed_out(self, batch: Batch, send: Callable[[], None]) -> None:
        """Record that a batch is handed out, and change the number of workers if `auto` says so.

        `send` sends what there are workers for now.
        """
        auto, before = self._auto, self._times_ns
        if auto is None:
            return
        now = self._times_ns = self._counters.step_ns, self._counters.transport_ns, self._counters.wait_ns
        auto.must_stay = auto.must_stay or self._pool.has_effects()
        if before is None:
            return
        timing = BatchTiming(
            step_ns=now[0] - before[0],
            handling_ns=now[1] - before[1],
            wait_ns=now[2] - before[2],
            work_ns=batch.work_ns,
            busy_ns=batch.result.busy_ns,
        )
        if self._dispatch.mode != "demand":
            auto.note(timing)
        elif self._is_behind:
            self._follow(send)
        elif self._new:
            self._new = {worker for worker in self._new if not self._pool.is_ready(worker)}
            if not self._new:
                auto.begin()
        elif auto.observe(timing) != self._pool.size:
            self._follow(send)

    def on_worker_crash(self) -> None:
        """Keep workers from now on: what crashes a worker must not be made in the training process."""
        if self._auto is not None:
            self._auto.must_stay = True

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _follow(self, send: Callable[[], None]) -> None:
        """Resize the pool to the number that `auto` wants, as far as that is possible now.

        Each worker gets what it makes first as soon as it is started.
        """
        assert self._auto is not None
        wanted, present = self._auto.workers, self._pool.size
        if wanted > present and available_nbytes() < LEAST_NBYTES:
            self._auto.limit(present, "there is no memory left for more")
            wanted = present
        while self._resize(min(self._pool.size + 1, wanted)) and self._pool.size < wanted:
            self._is_behind = True  # also if the sampler raises now
            send()
        self._new = set(range(present, self._pool.size))
        self._auto.begin()
        self.report_workers()

    def _resize(self, workers: int) -> bool:
        """Have so many workers, one more or fewer; return whether there are."""
        assert self._auto is not None
        try:
            with self._counters.changing_workers():
                self._is_behind = not self._pool.resize(workers)
        except (WorkerStartError, TransportError):
            self._is_behind = False
            self._auto.limit(self._pool.size, "the system starts no more")
        self._dispatch.resize(self._pool.size)
        return self._pool.size == workers

    def report_workers(self) -> None:
        """Count how many workers there are, and why."""
        if self._auto is None:
            return
        self._counters.workers, why = self._pool.size, self._auto.reason
        if self._dispatch.mode == "round_robin":
            never = "and workers are persistent, so it does not change"
            when = never if self._auto.is_persistent else "so it changes between epochs only"
            why = f"{why}; samples may depend on their worker, {when}"
        asked = f"; the script asked for {self._auto.asked or 'none'}" if self._auto.asked is not None else ""
        self._counters.workers_reason = f"auto: {why}{asked}"


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
        if batch.is_made:
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
