"""A pool whose number of workers follows the autoscale policy, or stays what it is.

Nothing that is under way is disturbed: a retired worker finishes its task first, and a new one takes the next task.
Without workers, the training process makes its batches itself, when they are asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from torch._utils import ExceptionWrapper

from penstock.core.errors import TransportError, WorkerStartError
from penstock.core.host import available_nbytes
from penstock.loader.counters import Counters
from penstock.loader.scheduling.autoscale import AutoscalePolicy
from penstock.loader.scheduling.batch import Batch
from penstock.loader.scheduling.batches_in_flight import BatchWindow
from penstock.loader.scheduling.dispatch_policy import Dispatch
from penstock.loader.scheduling.worker_limits import BatchTiming
from penstock.loader.transport.arena import Arena
from penstock.loader.transport.ring import Ring
from penstock.loader.transport.slot import Slot
from penstock.loader.workers.batch_fetcher import BatchFetcher
from penstock.loader.workers.fetch_result import NothingLeftError
from penstock.loader.workers.pool import Pool, Task, TaskResult
from penstock.loader.workers.worker_spec import WorkerSpec

_LEFT_NBYTES = 256 << 20
"""No worker is started while less memory is available to this process."""


class ScalingPool:
    """Keeps a pool at the number of workers that the policy wants; without a policy, at the number it has.

    The scheduler calls all methods, in the thread that iterates: `begin_epoch` for each epoch, `handed_out` for each
    batch.
    """

    def __init__(
        self,
        *,
        worker_spec: WorkerSpec,
        pool: Pool,
        ring: Ring,
        dispatch: Dispatch,
        counters: Counters,
        autoscale: AutoscalePolicy | None,
    ) -> None:
        self.tasks: deque[Task] = deque()
        """Tasks that the training process will make itself."""
        self._worker_spec = worker_spec
        self._pool = pool
        self._ring = ring
        self._dispatch = dispatch
        self._counters = counters
        self._policy = autoscale
        self._fetcher: BatchFetcher | None = None
        self._new: set[int] = set()
        """Workers that were started and are not ready yet."""
        self._times_ns: tuple[int, int, int] | None = None
        """Step, handling and wait, as counted when the last batch was handed out."""
        self._began_ns = 0, 0, 0
        """The same, when the epoch began."""
        self._is_behind = False
        """Whether the pool has to be resized again, because it could not follow the policy at once."""
        self.is_absent = autoscale is not None and pool.size == 0
        """Whether batches are made in the training process."""
        self.report_workers()

    def begin_epoch(self) -> None:
        """Begin an epoch: the pipeline is empty."""
        self._times_ns, self._began_ns = None, self._counted_ns()

    def handed_out(self, batch: Batch, window: BatchWindow, send: Callable[[], None]) -> None:
        """Record that a batch is handed out, and change the number of workers if the policy says so.

        `send` sends what there are workers for now; `window` knows how much that was.
        """
        policy = self._policy
        if policy is None:
            return
        now = self._counted_ns()
        before, self._times_ns = self._times_ns, now
        since = before or self._began_ns
        timing = BatchTiming(
            number=batch.number,
            step_ns=now[0] - since[0],
            handling_ns=now[1] - since[1],
            wait_ns=now[2] - since[2],
            work_ns=batch.work_ns,
            busy_ns=batch.busy_ns,
        )
        policy.limits.has_effects = policy.limits.has_effects or self._pool.has_effects()
        if self._dispatch.mode != "demand":
            if before is not None:
                policy.epochs.note(timing)
        elif self._is_behind:
            self._follow(window, send)
        elif self._new:
            self._new = {worker for worker in self._new if not self._pool.is_ready(worker)}
            if not self._new:
                policy.begin(window.next_number)
        else:
            present = policy.workers
            if (policy.observe_first if before is None else policy.observe)(timing) != present:
                self._follow(window, send)

    def _counted_ns(self) -> tuple[int, int, int]:
        return self._counters.step_ns, self._counters.transport_ns, self._counters.wait_ns

    def on_worker_crash(self, window: BatchWindow) -> None:
        """Keep at least one worker from now on: what crashes a worker must not be made in the training process."""
        if self._policy is not None:
            self._policy.require_worker()
            if self.is_absent:
                self._follow(window, lambda: None)
                while self.tasks and self._pool.size:
                    self._pool.submit(self.tasks.popleft())

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _follow(self, window: BatchWindow, send: Callable[[], None]) -> None:
        """Resize the pool to the number that the policy wants, as far as that is possible now.

        Each worker gets what it makes first as soon as it is started.
        """
        assert self._policy is not None
        wanted, present = self._policy.workers, self._pool.size
        if wanted > present and available_nbytes() < _LEFT_NBYTES:
            self._policy.limit(present, "there is no memory left for more")
            wanted = present
        if wanted == 0 and self._pool.outstanding():
            self.is_absent = self._is_behind = True  # the last worker finishes what it was given
            return
        while self._resize(min(self._pool.size + 1, wanted)) and self._pool.size < wanted:
            self._is_behind = True  # also if the sampler raises now
            send()
        self._new = set(range(present, self._pool.size))
        if not self._new:
            self._policy.begin(window.next_number)
        self.report_workers()

    def _resize(self, workers: int) -> bool:
        """Have so many workers, one more or fewer; return whether there are."""
        assert self._policy is not None
        try:
            with self._counters.changing_workers():
                self._is_behind = not self._pool.resize(workers)
        except (WorkerStartError, TransportError):
            self._is_behind = False
            self._policy.limit(self._pool.size, "the system starts no more")
        self.is_absent = self._pool.size == 0
        self._dispatch.resize(max(1, self._pool.size))
        return self._pool.size == workers

    def report_workers(self) -> None:
        """Count how many workers there are, and why."""
        if self._policy is None:
            return
        self._counters.workers = self._pool.size
        if self._dispatch.mode == "round_robin":
            never = "and workers are persistent, so it does not change"
            when = never if self._policy.epochs.is_persistent else "so it changes between epochs only"
            why = f"{self._policy.epochs.reason}; samples may depend on their worker, {when}"
        else:
            why = self._policy.reason
        asked = f"; the script asked for {self._policy.asked or 'none'}" if self._policy.asked is not None else ""
        self._counters.workers_reason = f"auto: {why}{asked}"

    # ── without workers ─────────────────────────────────────────────────────────────────────────────────────

    def make(self) -> TaskResult:
        """Make the next task in this thread."""
        task = self.tasks[0]  # removed when it is done, so that Ctrl-C does not lose it
        result = TaskResult(task.seq, -1, task)
        try:
            self._fetcher = self._fetcher or BatchFetcher(self._worker_spec, in_training_process=True)
            self._make(self._fetcher, task, result)
        except NothingLeftError as nothing:
            result.empty, result.skipped = True, nothing.fetched.skipped
        except Exception:  # noqa: BLE001  the user's dataset runs here
            result.error = ExceptionWrapper(where="in the training process, which makes its batches itself")
        self.tasks.popleft()
        return result

    def _make(self, fetcher: BatchFetcher, task: Task, result: TaskResult) -> None:
        def enlarge(needed: int) -> Arena:
            self._ring.require(needed)
            return Arena(np.empty(needed, np.uint8))

        slot = task.destination.slot
        arena = Arena(self._memory_of(task, slot))
        fetched = fetcher.make(task.indices, arena, epoch_seed=task.epoch_seed, enlarge=enlarge)
        result.samples, result.skipped = fetched.samples, fetched.skipped
        result.fetch_ns, result.collate_ns, result.busy_ns = fetched.fetch_ns, fetched.collate_ns, fetched.busy_ns
        result.nbytes = fetched.arena.used if fetched.arena is not None else 0
        result.batch, result.is_batch = fetched.batch, True
        if slot is not None and fetched.arena is arena:
            self._ring.note(slot, arena.used)

    def _memory_of(self, task: Task, slot: Slot | None) -> np.ndarray:
        """Return the memory of a task's slot, which is lent at once, and free when its views have died."""
        if slot is None:
            return np.empty(0, np.uint8)
        task.destination.slot = None
        self._ring.commit(slot, 0)
        return self._ring.lend(slot)
