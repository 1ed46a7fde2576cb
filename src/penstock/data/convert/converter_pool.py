"""The worker processes of a conversion: each runs one task at a time; contiguous tasks go to the same worker.

A worker is a new Python process that inherits only one end of a socket and the conversion's lock. The program's
`__main__` is not imported, so a script needs no guard. A worker exits when its socket is closed, also in the middle of
a task, so none outlives the conversion.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from typing import Any

from penstock.core.errors import WorkerError
from penstock.core.interpreter import arguments_of
from penstock.data.convert.task import Call, ReportProgress, T, TaskContext, run_task

_MAIN = "from penstock.data.convert.task import main; main()"


class WorkStealingQueue:
    """Tasks for some workers: each has a queue of contiguous tasks; when it is empty, it takes half of the longest one.

    >>> work_queue = WorkStealingQueue([0, 1, 2, 3, 4, 5], 2)
    >>> [work_queue.next(who) for who in (0, 1, 0, 0, 0, 1, 0)]
    [0, 3, 1, 2, 5, 4, None]
    """

    def __init__(self, tasks: Sequence[Any], workers: int) -> None:
        boundaries = [len(tasks) * worker // workers for worker in range(workers + 1)]
        self._queues = [deque(tasks[first:stop]) for first, stop in pairwise(boundaries)]

    def next(self, worker: int) -> Any:
        """Return a worker's next task; None if none is left."""
        own = self._queues[worker]
        if own:
            return own.popleft()
        longest = max(self._queues, key=len)
        half = [longest.pop() for _ in range((len(longest) + 1) // 2)]
        own.extend(reversed(half))
        return own.popleft() if own else None


class ConverterPool:
    """Worker processes; with none, tasks run in this process.

    Args:
        count: how many.
        report: called with the samples and bytes that were processed since the last call.
        lock: a descriptor that they keep open; None for none.
    """

    def __init__(self, count: int, report: ReportProgress, lock: int | None = None) -> None:
        self.count = count
        self._report = report
        self._lock = lock
        self._workers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._context = TaskContext(report)

    def run(self, action: str, calls: Sequence[Call[T]]) -> list[T]:
        """Return what the calls return, in their order; `action` is what they do, for error messages.

        Raises:
            WorkerError: a worker has died.
        """
        count = min(self.count, len(calls))
        if count == 0:
            return [run_task(self._context, action, number, call) for number, call in enumerate(calls)]
        self._start(count)
        results: dict[int, T] = {}
        work_queue = WorkStealingQueue(range(len(calls)), count)
        under_way: dict[Connection, tuple[int, int]] = {}

        def assign(worker: int) -> None:
            number = work_queue.next(worker)
            if number is not None:
                channel = self._workers[worker][1]
                under_way[channel] = worker, number
                with contextlib.suppress(OSError):  # it is dead: `_receive` raises
                    channel.send_bytes(pickle.dumps((action, number, calls[number])))

        for worker in range(count):
            assign(worker)
        while under_way:
            for ready in wait(list(under_way)):
                assert isinstance(ready, Connection)
                worker, number = under_way[ready]
                kind, value = self._receive(worker, f"{action} {number}")
                if kind == "progress":
                    self._report(*value)
                elif kind == "done":
                    del under_way[ready]
                    results[number] = value
                    assign(worker)
                else:
                    raise value
        return [results[number] for number in range(len(calls))]

    def close(self) -> None:
        """Stop the workers, also in the middle of a task."""
        self._context.close()
        for process, channel in self._workers:
            channel.close()
            process.kill()  # what it has not finished does not count
            process.wait()
        self._workers.clear()

    def _start(self, count: int) -> None:
        while len(self._workers) < count:
            ours, theirs = socket.socketpair()
            with theirs:
                inherited = (theirs.fileno(),) if self._lock is None else (theirs.fileno(), self._lock)
                command = [sys.executable, *arguments_of(_MAIN, str(theirs.fileno()))]
                try:
                    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited, process_group=0)
                except OSError as error:
                    ours.close()
                    raise WorkerError(f"a worker process could not be started: {error}") from error
            self._workers.append((process, Connection(ours.detach())))

    def _receive(self, worker: int, doing: str) -> tuple[str, Any]:
        process, channel = self._workers[worker]
        try:
            kind, value = channel.recv()
        except (EOFError, OSError):
            code = process.wait()
            end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            hint = (
                "; the kernel kills processes when memory runs out: use fewer workers"
                if code == -signal.SIGKILL
                else ""
            )
            raise WorkerError(f"a worker {end} while {doing}{hint}") from None
        return kind, value
