"""Epochs on a pool of workers: sends tasks, puts results together to batches, and replaces workers that crash.

A batch's way through this module: `_send` (a slot and a task) → results → `_finish` (finished, in its
place) → `_hand_out` (decoded into views that hold the slot). All of it happens in the thread that calls `next`.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, cast

from penstock.core.errors import TransportError, WorkerError, WorkerStartError, WorkerTimeoutError
from penstock.core.events import Recorder
from penstock.core.signals.interrupts import uninterrupted_finalizer
from penstock.loader.checkpoint.epoch_state import EpochState
from penstock.loader.counters import Counters
from penstock.loader.sampling.stream_cursor import Consumed
from penstock.loader.scheduling.auto_workers import LOOK_NS, AutoWorkers
from penstock.loader.scheduling.batch import Batch, BatchWindow, Opener
from penstock.loader.scheduling.crashes import CrashCounter
from penstock.loader.scheduling.dispatch import Dispatch, IndicesAhead
from penstock.loader.scheduling.scaling_pool import FirstBatch, ScalingPool
from penstock.loader.transport.ring import Ring, Slot
from penstock.loader.workers.messages import Result, Task
from penstock.loader.workers.pool import Pool, WorkerCrash
from penstock.loader.workers.stream_shard import StreamShard
from penstock.loader.workers.worker_spec import WorkerSpec

_LOST_NS = 50_000
"""Shorter waits tell nothing about idle workers."""


class Scheduler:
    """Runs epochs on one pool; the loader's iterator asks it for batch after batch.

    `start` once, `begin` for each epoch, then `next_batch` until StopIteration; `close` at the end, which a finalizer
    calls as well. After any other exception than the dataset's own, only `close` may follow.
    """

    def __init__(
        self,
        *,
        worker_spec: WorkerSpec,
        pool: Pool,
        ring: Ring,
        dispatch: Dispatch,
        counters: Counters,
        in_order: bool,
        timeout_s: float,
        max_worker_crashes: int,
        spare_slots: int = 1,
        snapshot_every: int = 1,
        auto_workers: AutoWorkers | None = None,
        first_batch: FirstBatch | None = None,
        opener: Opener | None = None,
    ) -> None:
        self._worker_spec = worker_spec
        self._ring = ring
        self._dispatch = dispatch
        self._counters = counters
        self._in_order = in_order
        self._timeout_s = timeout_s if timeout_s > 0 else None
        self._spare_slots = spare_slots
        self._snapshot_every = snapshot_every
        self._scales = auto_workers is not None
        self._opener = opener or Opener(ring, counters)
        self._first_batch = first_batch
        """While there is one worker, and its first batch decides how many there will be."""
        self._seq = 0
        self._has_begun = False
        self._crashes = CrashCounter(worker_spec, max_worker_crashes)
        self._window = BatchWindow(in_order=in_order)
        self._shards: list[StreamShard] = []
        self._shard_batches: list[int] = []
        """How many batches of this epoch each shard has begun."""
        self._drawn = IndicesAhead(worker_spec, iter(()))
        self._epoch_seed = 0
        self._exhausted = True
        """Whether there is no further batch to send in this epoch."""
        self.consumed: Sequence[Consumed] = ()
        """What handing out the last batch has used up."""
        self.pool = pool
        self.scaling_pool = ScalingPool(pool=pool, dispatch=dispatch, counters=counters, auto=auto_workers)
        # Also when the program ends with the iterator alive; and without a reference back to this object.
        self.close = weakref.finalize(self, _close, pool, ring)
        ring.announce = pool.announce

    def start(self, shards: Sequence[StreamShard] = ()) -> None:
        """Start the workers; for an iterable dataset, with its shards."""
        try:
            self.pool.start(shards)
        except BaseException:
            self.close()
            raise
        self._ring.announce_all(self.pool.announce)

    @property
    def is_open(self) -> bool:
        """Whether the workers have not been stopped."""
        return self.close.alive

    def begin(self, epoch: EpochState) -> None:
        """Begin an epoch, the first with the shards of `start`; what is left of an earlier one is cancelled."""
        self._shards = [*epoch.shards]
        if self._has_begun:  # also after a pass of which nothing was left: workers have its shards
            self._cancel()
        self._has_begun = True
        self._drawn = IndicesAhead(self._worker_spec, epoch.indices)
        self._epoch_seed = epoch.epoch_seed
        self._window = BatchWindow(in_order=self._in_order)
        self.consumed = ()
        self._exhausted = self._worker_spec.iterable and all(shard.has_ended for shard in self._shards)
        self._shard_batches = [0] * len(self._shards)
        self._counters.dispatch, self._counters.dispatch_reason = self._dispatch.mode, self._dispatch.reason
        self._dispatch.begin_epoch([not shard.has_ended for shard in self._shards], epoch.turn)
        self.scaling_pool.begin_epoch()
        if self._first_batch is not None:
            self._start_others(self._first_batch)
            self._first_batch = None
        self._send_more()

    def _start_others(self, first_batch: FirstBatch) -> None:
        """Start as many workers as the first one's first batch shows to be needed, and give each of them a batch."""
        self._send_more(most=1)
        batch, began = self._window.get(0), time.perf_counter_ns()
        events = self.pool.collect(LOOK_NS / 1e9) if batch is not None and not batch.is_made else []
        passed_ns = time.perf_counter_ns() - began
        self._counters.wait_ns += passed_ns
        self._handle(events)
        has_crashed = any(isinstance(event, WorkerCrash) for event in events)
        workers = first_batch.choose(batch, passed_ns, has_crashed=has_crashed)
        self._dispatch.add_workers(workers, self._window.next_number)
        while self.pool.size < workers:
            try:
                self.pool.resize(self.pool.size + 1)
            except (WorkerStartError, TransportError):
                if not first_batch.limit(self.pool.size):
                    raise
                workers = self.pool.size
                self._dispatch.add_workers(workers, self._window.next_number)
            self._send_more(most=self.pool.size)
        first_batch.settle()
        self.scaling_pool.report_workers()

    def _cancel(self) -> None:
        finish = self._dispatch.mode != "demand"  # as torch's workers do, because it may change what they make next
        while finish and not self._exhausted and self._drawn.waiting and self._send(None, self._dispatch.drawn_ahead):
            pass
        untaken = self.pool.cancel(self._shards, finish=finish)
        self._window.cancel(self._ring)
        for task in untaken:
            cast(Batch, task).drop(self._ring)

    @property
    def consumed_since(self) -> list[Consumed]:
        """What was used up since the last batch that was handed out: batches without samples."""
        return self._window.consumed_since

    def count_ready(self, finished: Collection[Task]) -> int:
        """Return how many batches are finished and not handed out; see `BatchWindow.count_ready`."""
        return self._window.count_ready(finished)

    # ── handing out ─────────────────────────────────────────────────────────────────────────────────────────

    def next_batch(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: the epoch is over.
            WorkerTimeoutError, WorkerKilledError, or what the dataset, the sampler or collate function raised.
        """
        while True:
            batch = self._window.pop_ready()
            if batch is not None:
                return self._hand_out(batch)
            if self._window.under_way < self._dispatch.max_in_flight:
                self._send_more()
            if not self._window.under_way and self._is_over:
                raise StopIteration
            self._wait()

    def try_next(self) -> tuple[Any] | None:
        """Return the next batch, in a tuple, if it is finished; raises as `next_batch` does."""
        while (batch := self._window.pop_ready()) is None:
            events = self.pool.collect(0.0)
            if not events:
                if self._is_over:
                    raise StopIteration
                return None
            self._handle(events)
        return (self._hand_out(batch),)

    @property
    def _is_over(self) -> bool:
        return not self._window.under_way and (self._exhausted or self._drawn.failures > 0)

    def _hand_out(self, batch: Batch) -> Any:
        try:
            if self._scales:
                self.scaling_pool.handed_out(batch, self._send_more)
            self._send_more()
        except BaseException:  # the sampler's, for which torch drops the batch, too
            batch.drop(self._ring)
            raise
        if batch.error is not None:
            batch.raise_error(self._ring)
        self.consumed = self._window.take_consumed()
        return self._opener.open(batch)

    # ── sending ─────────────────────────────────────────────────────────────────────────────────────────────

    def _send_more(self, most: int | None = None) -> None:
        """Send batches until as many are under way as there may be, or `most`."""
        dispatch, window, drawn = self._dispatch, self._window, self._drawn
        limit = dispatch.max_in_flight
        if most is not None and most < limit:
            limit = most
        while not self._exhausted and window.under_way + drawn.failures < limit:
            if not drawn.waiting and not drawn.draw():
                self._exhausted = True
                break
            # Beside the window, slots for copies that the user has started.
            slot = self._ring.acquire(limit + self._spare_slots, grow=window.under_way == 0)
            if slot is None and window.under_way:
                break
            if not self._send(slot, limit):
                break
        # As many as torch draws ahead, whatever the window: a sampler may tell when it is asked.
        while window.under_way + len(drawn.waiting) + drawn.failures < dispatch.drawn_ahead and drawn.draw():
            pass

    def _send(self, slot: Slot | None, limit: int) -> bool:
        """Send the batch that was drawn first; return whether a worker may have it now."""
        taker, dispatch, window = None, self._dispatch, self._window
        if dispatch.mode != "demand":
            taker = dispatch.next_taker(in_order=self._in_order, most=limit)
            if taker is None:
                self._exhausted = not any(dispatch.active)
                if slot is not None:
                    self._ring.release(slot)
                return False
            dispatch.load[taker] += 1
        indices, packed = self._drawn.waiting.popleft()
        batch = Batch(window.next_number, indices, slot, taker, self._epoch_seed, packed)
        if self._shards and taker is not None:
            self._assign_shard(batch, taker)
        window.add(batch)
        self._submit(batch)
        return True

    def _submit(self, batch: Batch) -> None:
        self._seq = batch.seq = self._seq + 1
        self.pool.submit(batch)

    def _assign_shard(self, batch: Batch, shard: int) -> None:
        batch.shard, batch.worker = shard, shard % self.pool.size
        self._shard_batches[shard] += 1
        batch.wants_state = self._snapshot_every > 0 and self._shard_batches[shard] % self._snapshot_every == 0

    # ── results ─────────────────────────────────────────────────────────────────────────────────────────────

    def _wait(self) -> None:
        began = time.perf_counter_ns()
        events = self.pool.collect(self._timeout_s)
        waited_ns = time.perf_counter_ns() - began
        self._counters.wait_ns += waited_ns
        if self._counters.recorder is not None:
            self._counters.recorder.add_wait(began, began + waited_ns, self._counters.epochs, self._window.next_out)
        if waited_ns > _LOST_NS and not self._exhausted:
            self._dispatch.starved(waited_ns * self._dispatch.idle(self._window))
        if not events:
            raise WorkerTimeoutError(self._describe_timeout())
        self._handle(events)

    def _handle(self, events: list[Result | WorkerCrash]) -> None:
        for event in events:
            if isinstance(event, WorkerCrash):
                self._on_worker_exit(event)
            else:
                self._on_result(event)

    def _on_result(self, result: Result) -> None:
        batch = cast(Batch, result.task)
        self._crashes.reset_startup_count()
        if batch.cancelled:
            if result.oversize is not None:
                result.oversize.close()
            batch.drop(self._ring)
            return
        counters, fetch_ns, collate_ns = self._counters, result.fetch_ns, result.collate_ns
        counters.fetch_ns += fetch_ns
        counters.collate_ns += collate_ns
        if result.busy_ns < fetch_ns + collate_ns:
            counters.asleep_ns += fetch_ns + collate_ns - result.busy_ns
        if counters.recorder is not None:
            _record(counters.recorder, result, batch, counters.epochs)
        if result.skipped:
            counters.skip(result.skipped)
        if self._shards:
            self._advance_shard(batch, result)
        batch.finish(result, self._ring)
        self._finish(batch)

    def _advance_shard(self, task: Task, result: Result) -> None:
        shard = self._shards[task.shard]
        if result.ended:
            self._dispatch.active[task.shard] = False
            self._shards[task.shard] = replace(shard, has_ended=True)
        else:
            self._shards[task.shard] = shard.after(self._stream_batch(task), result.state)

    def _stream_batch(self, task: Task) -> int | None:
        """Return the size of a batch of an iterable dataset; None for a map-style one."""
        if not self._worker_spec.iterable:
            return None
        return len(task.indices) if self._worker_spec.auto_collation else 1

    def _finish(self, batch: Batch) -> None:
        """Mark a batch as finished."""
        dispatch = self._dispatch
        if batch.taker is not None:
            dispatch.load[batch.taker] -= 1
        if dispatch.may_run_ahead and batch.error is None and not batch.is_empty:
            dispatch.learn(batch.work_ns)
        if not self._in_order:
            self._window.finish(batch)

    # ── crashes ─────────────────────────────────────────────────────────────────────────────────────────────

    def _on_worker_exit(self, crash: WorkerCrash) -> None:
        """Replace a dead worker and submit its tasks again, unless a sample has killed too many."""
        at_fault = crash.task_at_fault
        try:
            if at_fault is None and not crash.is_machine_failure:
                self._crashes.count_startup_crash(crash)
            elif at_fault is not None and self._worker_spec.iterable:
                self._crashes.count_stream_crash(crash, at_fault.shard, at_fault.number)
        except WorkerError:
            self.close()
            raise
        if not crash.is_retired:
            self._counters.restarts += 1
            self.pool.replace(crash.worker, self._shards)
        self.scaling_pool.on_worker_crash()
        for task in sorted(crash.lost, key=lambda task: task.seq):
            batch = cast(Batch, task)
            if batch.cancelled:
                batch.drop(self._ring)
            elif batch is at_fault and self._crashes.should_quarantine(batch, crash):
                self._quarantine(batch, crash)
            else:
                self._retry(batch)
        if self._dispatch.mode == "round_robin" and not crash.is_retired:
            warnings.warn(
                f"A DataLoader worker {crash.cause} Its work is done again by a successor that begins as the worker "
                "began: samples that depend on what their worker has made before differ from those of a run without "
                "this. If none do, dispatch='demand' says so",
                RuntimeWarning,
                stacklevel=2,
            )

    def _retry(self, batch: Batch) -> None:
        self._counters.retried += 1
        if batch.worker is not None and batch.worker >= self.pool.size:
            batch.worker = None
        self._submit(batch)

    def _quarantine(self, batch: Batch, crash: WorkerCrash) -> None:
        index = self._crashes.sample_at_fault(batch, crash.row)
        self._counters.quarantined.append(index)
        if self._worker_spec.errors == "raise":
            batch.error = self._crashes.quarantine_error(index, crash)
        else:
            self._counters.skip([(index, crash.cause)])
            rows = () if index is batch.indices else enumerate(batch.indices)
            kept = [other for row, other in rows if row != crash.row and other is not index]
            if kept:
                batch.indices, batch.packed = kept, b""
                self._submit(batch)
                return
            batch.is_empty = True
            batch.drop(self._ring)
        batch.is_made = True
        self._finish(batch)

    def _describe_timeout(self) -> str:
        clauses = [f"DataLoader timed out after {self._timeout_s:g} seconds"]
        for worker, process in enumerate(self.pool.processes):
            task, row = self.pool.current_task(worker)
            if task is not None and not task.cancelled:
                index = self._crashes.sample_at_fault(task, row) if not self._worker_spec.iterable else None
                what = "its stream" if self._worker_spec.iterable else f"sample {index!r}"
                clauses.append(f"worker {worker} (pid {process.pid}) is at {what}")
        return "; ".join([*clauses, "raise timeout, or look at what those samples wait for"])


def _record(recorder: Recorder, result: Result, task: Task, epoch: int) -> None:
    began, fetch, collate = result.began_ns, result.fetch_ns, result.collate_ns
    ended = began + fetch + collate
    recorder.add(("make", began, ended, epoch, task.number, result.pid, result.worker, fetch, collate, result.samples))


@uninterrupted_finalizer
def _close(pool: Pool, ring: Ring) -> None:
    ring.announce = lambda number, segment: None
    pool.close()
