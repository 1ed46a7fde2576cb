"""The worker processes of a conversion: each runs one task at a time; contiguous tasks go to the same worker.

A worker is a new Python process that inherits only one end of a socket and the conversion's lock. The program's
`__main__` is not imported, so a script needs no guard. A worker exits when its socket is closed, also in the middle of
a task, so none outlives the conversion.
"""

from __future__ import annotations

import json
import pickle
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from typing import Any

from penstock.core.errors import WorkerError
from penstock.data.convert.task import Task, TaskContext

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from penstock.data.convert.task import main; main()"
_GRACE_S = 2.0

ReportProgress = Callable[[int, int], None]
"""Called with numbers of samples and bytes that were processed."""


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
        workers: how many.
        lock: a descriptor that they keep open; None for none.
    """

    def __init__(self, workers: int, lock: int | None = None) -> None:
        self._count = workers
        self._lock = lock
        self._workers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._context: TaskContext | None = None

    def run(self, tasks: Sequence[Task], report: ReportProgress) -> Iterator[tuple[Task, Any]]:
        """Run all tasks; yield each with its result as it finishes."""
        if self._count == 0:
            yield from self._run_inline(tasks, report)
            return
        if not tasks:
            return
        self._start(min(self._count, len(tasks)))
        work_queue = WorkStealingQueue(tasks, len(self._workers))
        under_way: dict[Connection, tuple[int, Task]] = {}
        for number in range(len(self._workers)):
            self._assign(number, work_queue, under_way)
        while under_way:
            for ready in wait(list(under_way)):
                assert isinstance(ready, Connection)
                number, task = under_way[ready]
                kind, value = self._receive(number, task)
                if kind == "progress":
                    report(*value)
                elif kind == "done":
                    del under_way[ready]
                    yield task, value
                    self._assign(number, work_queue, under_way)
                else:
                    raise value

    def close(self) -> None:
        """Stop the workers, also in the middle of a task."""
        if self._context is not None:
            self._context.close()
            self._context = None
        for _, channel in self._workers:
            channel.close()
        for process, _ in self._workers:
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._workers.clear()

    def _run_inline(self, tasks: Sequence[Task], report: ReportProgress) -> Iterator[tuple[Task, Any]]:
        self._context = self._context or TaskContext(report)
        self._context.report = report
        for task in tasks:
            yield task, task.run(self._context)

    def _start(self, count: int) -> None:
        while len(self._workers) < count:
            ours, theirs = socket.socketpair()
            with theirs:
                inherited = (theirs.fileno(),) if self._lock is None else (theirs.fileno(), self._lock)
                command = [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs.fileno())]
                try:
                    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited, process_group=0)
                except OSError as error:
                    ours.close()
                    raise WorkerError(f"a worker process could not be started: {error}") from error
            self._workers.append((process, Connection(ours.detach())))

    def _assign(
        self, number: int, work_queue: WorkStealingQueue, under_way: dict[Connection, tuple[int, Task]]
    ) -> None:
        task = work_queue.next(number)
        if task is None:
            return
        channel = self._workers[number][1]
        under_way[channel] = (number, task)
        try:
            channel.send_bytes(pickle.dumps(task))
        except OSError:  # it is dead: `_receive` raises
            return

    def _receive(self, number: int, task: Task) -> tuple[str, Any]:
        process, channel = self._workers[number]
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
            raise WorkerError(f"a worker {end} while {task.action} {task.number}{hint}") from None
        return kind, value
