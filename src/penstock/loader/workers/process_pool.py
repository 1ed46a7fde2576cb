"""A pool of worker processes that notices each death and knows exactly which tasks died with a worker.

Tasks go out by two channels. The shared queue is one end of a socket from which any free worker takes the next task
(and claims it; see `transport.control_page`). A worker's inbox carries what is meant for that worker only:
announcements, and tasks that torch would have given to it. Results come back by one socket that all workers write to.
The bytes are described in `messages`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from penstock.core.errors import UnpicklableError, WorkerStartError
from penstock.core.object_attributes import attributes_of
from penstock.core.shared_segment import SharedSegment
from penstock.core.signals.interrupts import hold_interrupts
from penstock.loader.transport import channel, codec
from penstock.loader.transport.control_page import ControlPage
from penstock.loader.workers import messages, process_main
from penstock.loader.workers.messages import Result, Task
from penstock.loader.workers.pool import PoolSnapshot, WorkerCrash
from penstock.loader.workers.process_main import Descriptor, WorkerChannels
from penstock.loader.workers.stream_shard import StreamShard, shards_of_worker
from penstock.loader.workers.thread_gate import stopped_between_samples
from penstock.loader.workers.worker import WorkerOptions
from penstock.loader.workers.worker_spec import WorkerSpec

_PRELOAD = "penstock.loader.workers.preload"

_JOIN_S = 5.0
"""How long a worker may take to finish its sample when the pool closes; as torch's DataLoader waits."""

_Message = tuple[bytes, SharedSegment | None]
"""A message to an inbox, and the segment whose descriptor goes with it."""


class ProcessPool:
    """Worker processes of one loader; see `Pool` for the protocol.

    Args:
        worker_spec: what the workers do.
        workers: how many there are at first.
        most: how many there may be.
        reported_workers: what `get_worker_info().num_workers` returns.
        context: how they are started.
        is_default: whether the program has named no context; torch's workers then have another name.
        base_seed: worker k's random states begin with base_seed + k, as torch's.
        is_settled: whether `reported_workers` is final; else `plan_workers` may change it, until a worker asks for it
            or `settle_workers` is called.
        is_watched: whether workers look for what `has_effects` returns.

    Raises:
        TransportError: no descriptor or shared memory is left.
    """

    def __init__(
        self,
        worker_spec: WorkerSpec,
        workers: int,
        *,
        most: int,
        reported_workers: int,
        context: BaseContext,
        is_default: bool,
        base_seed: int,
        is_settled: bool = True,
        is_watched: bool = False,
    ) -> None:
        self.size = workers
        self._worker_spec = worker_spec
        self._context, self._is_default = context, is_default
        self._options = WorkerOptions(
            worker=0,
            workers=reported_workers,
            base_seed=base_seed,
            is_settled=is_settled,
            is_watched=is_watched,
        )
        self._segments: dict[int, SharedSegment] = {}
        self._outstanding: dict[int, Task] = {}
        self._waiting: deque[bytes] = deque()
        """Tasks that the shared queue has had no room for yet."""
        self._outboxes: list[deque[_Message]] = [deque() for _ in range(most)]
        self._has_unsent = False
        """Whether some worker's socket has had no room for a message."""
        self._inboxes: list[Any] = [None] * most
        self._poller = select.poll()
        self._by_sentinel: dict[int, int] = {}
        self._retiring: dict[int, BaseProcess] = {}
        """Workers that were retired and have not ended yet, by the number they had."""
        self._owner = os.getpid()
        self._closed = False
        self.processes: list[BaseProcess] = []
        self._control = ControlPage.make(most)
        self._control.plan_workers(reported_workers)
        self._to_workers, self._queue = channel.pair()
        self._results, self._from_workers = channel.pair()
        self._receiver = channel.Receiver(self._results)
        self._reclaimer = channel.Receiver(self._queue)
        self._poller.register(self._results, select.POLLIN)

    def _start_method(self) -> str:
        return self._context.get_start_method() or "fork"

    # ── starting ────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, shards: Sequence[StreamShard]) -> None:
        """Start all workers.

        Raises:
            UnpicklableError: what the workers need cannot travel to them, which takes a pickle but for "fork".
            WorkerStartError: the system allows no further process.
            TransportError: no descriptor is left.
        """
        if self._start_method() == "forkserver":
            self._preload()
        with self._beside_threads(), self._uninterrupted():
            for worker in range(self.size):
                self.processes.append(self._spawn(worker, shards_of_worker(shards, worker, self.size)))

    def _preload(self) -> None:
        """Have the fork server import torch once, not every worker; without effect on one that runs already."""
        from multiprocessing import forkserver

        wanted: Any = forkserver._forkserver
        names = getattr(wanted, "_preload_modules", ["__main__"])
        if _PRELOAD not in names:
            self._context.set_forkserver_preload([*names, _PRELOAD])

    def replace(self, worker: int, shards: Sequence[StreamShard]) -> None:
        """Start a successor for a dead worker, with its share of the shards as they are now."""
        self._control.forget(worker)
        with self._beside_threads(), self._uninterrupted():
            self.processes[worker] = self._spawn(worker, shards_of_worker(shards, worker, self.size))

    def resize(self, workers: int) -> bool:
        """Start workers or retire the last ones, until there are `workers`.

        A retired worker finishes its task first, and nobody waits for it. Until it has ended its number is in use: then
        no worker is started, and False is returned.

        Raises:
            WorkerStartError, TransportError: as `start`; those that could be started are there.
        """
        while self.size > workers:
            self.size -= 1
            self._retiring[self.size] = self.processes.pop()
            self._post(self.size, b"Q", None)
        while self.size < workers:
            if self.size in self._retiring:
                return False
            self._control.forget(self.size)
            with self._beside_threads(), self._uninterrupted():
                self.processes.append(self._spawn(self.size, {}))
                self.size += 1
        return True

    def is_ready(self, worker: int) -> bool:
        """Return whether a worker has opened its dataset and takes tasks."""
        return self._control.claimed(worker) is not None or self._control.row(worker) > 0

    def plan_workers(self, workers: int) -> int:
        """Plan to have `workers` workers; return how many there must be: another number, if one is settled already."""
        return self._control.plan_workers(workers)

    def settle_workers(self) -> None:
        """Have all workers, and those that replace them, know the number that was planned."""
        self._options = replace(self._options, workers=self._control.settle_workers(), is_settled=True)

    def has_effects(self) -> bool:
        """Return whether a sample has left something in its worker that would be noticed in this process."""
        return self._control.has_effects

    def outstanding(self) -> int:
        """Return how many tasks were submitted and have not been collected."""
        return len(self._outstanding)

    def _beside_threads(self) -> contextlib.AbstractContextManager[None]:
        """Stop worker threads between two samples while workers are forked, which inherit what a sample has locked."""
        return stopped_between_samples() if self._start_method() == "fork" else contextlib.nullcontext()

    def _uninterrupted(self) -> contextlib.AbstractContextManager[None]:
        """Hold Ctrl-C back while a worker is forked; other start methods lose none, and may wait for a process."""
        return hold_interrupts() if self._start_method() == "fork" else contextlib.nullcontext()

    def _spawn(self, worker: int, shards: dict[int, StreamShard]) -> BaseProcess:
        ours, theirs = channel.pair()
        control = self._control.handle()
        assert control.fd is not None
        ends = WorkerChannels(
            inbox=theirs,
            shared=self._queue,
            results=self._from_workers,
            control_nbytes=control.nbytes,
            control=Descriptor(control.fd),
            lock=Descriptor(self._control.lock_fd),
        )
        options = replace(self._options, worker=worker, shards=shards)
        process_class: type[BaseProcess] = self._context.Process  # type: ignore[attr-defined]
        process = process_class(target=process_main.main, args=(options, ends, self._worker_spec), daemon=True)
        if self._is_default:
            process.name = f"Process-{process.name.rpartition('-')[2]}"
        try:
            process.start()
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise WorkerStartError(
                    f"worker {worker} of {self.size} could not be started ({error.strerror}); lower num_workers, or "
                    "raise the limits on processes and open files (`ulimit -u`, `ulimit -n`)"
                ) from error
            if isinstance(error, (TypeError, AttributeError, pickle.PicklingError)):  # as torch tells these
                raise _unpicklable_error(self._worker_spec, self._start_method(), error) from error
            raise
        finally:
            theirs.close()
        self._inboxes[worker] = ours
        self._outboxes[worker] = deque(
            (messages.pack_segment(number, segment), segment) for number, segment in self._segments.items()
        )
        self._by_sentinel[process.sentinel] = worker
        self._poller.register(process.sentinel, select.POLLIN)
        self._flush_outbox(worker)
        self._has_unsent = self._has_unsent or bool(self._outboxes[worker])
        return process

    # ── sending ─────────────────────────────────────────────────────────────────────────────────────────────

    def announce(self, number: int, segment: SharedSegment | None) -> None:
        """Announce a new segment to every worker, or (None) that it may drop one."""
        if segment is not None:
            self._segments[number] = segment
            message = messages.pack_segment(number, segment)
        else:
            del self._segments[number]
            message = b"F" + pickle.dumps(number)
        for worker in (*range(len(self.processes)), *self._retiring):
            self._post(worker, message, segment)

    def submit(self, task: Task) -> None:
        """Queue a task; never blocks."""
        message = messages.pack_task(task, self._control.cells[0])
        self._outstanding[task.seq] = task
        if task.worker is not None:
            self._post(task.worker, b"W" + message, None)
        elif self._waiting or not channel.send(self._to_workers, message, block=False):
            self._waiting.append(message)

    def _post(self, worker: int, message: bytes, segment: SharedSegment | None) -> None:
        outbox = self._outboxes[worker]
        if segment is None and not outbox:
            try:
                if channel.send(self._inboxes[worker], message, block=False):
                    return
            except channel.Closed:  # the worker is dead; `collect` will find out
                pass
        outbox.append((message, segment))
        self._flush_outbox(worker)
        self._has_unsent = self._has_unsent or bool(outbox)

    def _flush_outbox(self, worker: int) -> None:
        outbox = self._outboxes[worker]
        try:
            while outbox:
                message, segment = outbox[0]
                fd = None if segment is None else segment.handle().fd
                fds = () if fd is None else (fd,)
                if not channel.send(self._inboxes[worker], message, fds, block=False):
                    return
                outbox.popleft()
        except channel.Closed:  # the worker is dead; `collect` will find out
            pass

    def _flush_queue(self) -> None:
        while self._waiting and channel.send(self._to_workers, self._waiting[0], block=False):
            self._waiting.popleft()

    def _flush_all(self) -> None:
        if self._waiting:
            self._flush_queue()
        if self._has_unsent:
            for worker, outbox in enumerate(self._outboxes):
                if outbox:
                    self._flush_outbox(worker)
            self._has_unsent = any(self._outboxes)

    # ── collecting ──────────────────────────────────────────────────────────────────────────────────────────

    def collect(self, timeout_s: float | None) -> list[Result | WorkerCrash]:
        """Wait until something happens, at most `timeout_s` seconds, and return everything that has happened."""
        results = self._receive_results()
        if results and not self._retiring:  # else one may have ended, and frees its number
            if self._waiting or self._has_unsent:
                self._flush_all()
            return results
        return self._collect(results, timeout_s)

    def _collect(self, events: list[Result | WorkerCrash], timeout_s: float | None) -> list[Result | WorkerCrash]:
        """Wait for messages, and for workers that end, unless there are `events` already."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if events:
                self._flush_all()
                if not self._retiring:
                    return events
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = self._poller.poll(0 if events else None if remaining is None else remaining * 1000)
            dead = [self._by_sentinel[fd] for fd, _ in ready if fd in self._by_sentinel]
            for worker in dead:
                events += self._reap(worker)
            if events:
                return events
            if not ready and remaining is not None and remaining <= 0:
                return []
            events = self._receive_results()

    def _receive_results(self) -> list[Result | WorkerCrash]:
        results: list[Result | WorkerCrash] = []
        outstanding = self._outstanding
        while outstanding and (message := self._receiver.receive(block=False)) is not None:
            result = messages.unpack_result(*message)
            result.task = outstanding.pop(result.seq)
            results.append(result)
        return results

    def current_task(self, worker: int) -> tuple[Task | None, int]:
        """Return the task that a worker makes, and the row it has reached."""
        claimed = self._control.claimed(worker)
        return (None if claimed is None else self._outstanding.get(claimed)), self._control.row(worker)

    def _reap(self, worker: int) -> list[Result | WorkerCrash]:
        """Find out which tasks a dead worker had; return the results that came in meanwhile, and the crash.

        Under the lock no worker is between taking a task and claiming it. The results are read after the claims: a
        worker sends its result before it claims another task, so a task that is neither queued nor claimed nor among
        the results has been lost with its worker.
        """
        is_retired = worker in self._retiring
        process = self._retiring.pop(worker) if is_retired else self.processes[worker]
        self._poller.unregister(process.sentinel)
        del self._by_sentinel[process.sentinel]
        process.join()
        with self._control.lock():
            self._reclaim_queue()
            others = {*range(self.size), *self._retiring} - {worker}
            claims = {self._control.claimed(other) for other in others}
        results = self._receive_results()
        claimed, row = self.current_task(worker)
        queued = {messages.task_seq(message) for message in self._waiting}
        lost = [
            task
            for seq, task in self._outstanding.items()
            if task.worker == worker or (task.worker is None and seq not in queued and seq not in claims)
        ]
        for task in lost:
            del self._outstanding[task.seq]
        self._inboxes[worker].close()
        self._outboxes[worker].clear()
        self._flush_queue()
        if is_retired and not lost:
            return [*results]
        cause, pid = _exit_cause(process.exitcode), process.pid or 0
        return [*results, WorkerCrash(worker, pid, cause, lost, claimed if claimed in lost else None, row, is_retired)]

    def _reclaim_queue(self) -> None:
        """Take back everything that waits in the shared queue, in order, ahead of what has not fitted in yet."""
        reclaimed = []
        while (message := self._reclaimer.receive(block=False)) is not None:
            reclaimed.append(message[0])
        self._waiting.extendleft(reversed(reclaimed))

    def cancel(self, shards: Sequence[StreamShard], *, finish: bool) -> list[Task]:
        """Cancel all tasks and begin a new epoch with these shards; return the tasks that no worker had taken.

        With `finish`, tasks for one worker only are made before that worker begins the new epoch.
        """
        if not finish:
            self._control.cells[0] += 1
        with self._control.lock():
            self._reclaim_queue()
        untaken = [self._outstanding.pop(messages.task_seq(message)) for message in self._waiting]
        self._waiting.clear()
        for task in self._outstanding.values():
            task.cancelled = True
        for worker in range(self.size):
            self._post(worker, b"E" + pickle.dumps(shards_of_worker(shards, worker, self.size)), None)
        return untaken

    def snapshot(self) -> PoolSnapshot:
        """Return what the workers do just now, from the control page; see `Pool.snapshot`."""
        control = self._control
        idle = [control.is_idle(worker) for worker in range(self.size)]
        claims = [control.claimed(worker) for worker in range(self.size)]
        tasks = list(self._outstanding.values())
        busy = {claim for claim, is_idle in zip(claims, idle, strict=True) if claim is not None and not is_idle}
        # Tasks are taken in the order of their numbers, from the shared queue as from each inbox: what is not larger
        # than the newest claim and not being made is finished.
        reached = [-1 if claim is None else claim for claim in claims]
        newest = max(reached, default=-1)
        finished = {
            task
            for task in tasks
            if not task.cancelled
            and task.seq not in busy
            and task.seq <= (newest if task.worker is None else reached[task.worker])
        }
        return PoolSnapshot(finished, working=len(busy), starting=claims.count(None))

    # ── ending ──────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Stop the workers and wait for them; those that do not end in time are killed."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        self._control.cells[0] += 1
        for inbox in self._inboxes:
            if inbox is not None:
                inbox.close()
        deadline = time.monotonic() + _JOIN_S
        everybody = [*self.processes, *self._retiring.values()]
        for process in everybody:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in everybody:
            if process.is_alive():
                process.kill()
                process.join()
        for end in (self._to_workers, self._queue, self._results, self._from_workers):
            end.close()
        self._control.close()
        for process in everybody:
            _close_descriptors(process)


def _close_descriptors(process: Any) -> None:
    """Close what multiprocessing holds of a process that has ended.

    It would be closed when the object dies, in the callback of a weak reference, in which a Ctrl-C is lost.
    """
    popen = getattr(process, "_popen", None)
    if popen is not None and popen.returncode is not None:
        popen.close()


def _exit_cause(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"is killed by signal: {signal.strsignal(-exitcode) or -exitcode}."
    return f"exited unexpectedly with code {exitcode}."


def _unpicklable_error(worker_spec: WorkerSpec, start_method: str, error: Exception) -> UnpicklableError:
    """Return the error that names what of the spec could not be pickled."""
    return UnpicklableError(
        f"{_unpicklable_part(worker_spec)} cannot be pickled, which start method {start_method!r} needs: "
        f"{error}; define it at the top of a module (no lambda, no local class, no open file), or pass "
        "multiprocessing_context='fork'"
    )


def _unpicklable_part(worker_spec: WorkerSpec) -> str:
    """Return a description of the smallest named part that cannot be pickled."""
    parts = {"worker_init_fn": "init_fn", "collate_fn": "collate_fn", "errors": "errors", "dataset": "dataset"}
    for name, field in parts.items():
        part = getattr(worker_spec, field, None)
        if _pickles(part):
            continue
        for attribute, value in attributes_of(part).items():
            if not _pickles(value):
                return f"{name}.{attribute} ({type(value).__qualname__})"
        return f"the {name} ({type(part).__qualname__})"
    return "the dataset"


def _pickles(obj: Any) -> bool:
    try:
        codec.flatten(obj)
    except Exception:
        return False
    return True
