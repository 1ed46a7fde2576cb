"""The processes of a conversion: each does one task at a time; contiguous tasks go to the same one.

A worker is a Python of its own, started afresh: nothing is inherited but one end of a socket and the conversion's lock,
and the program's `__main__` is not run again. It ends when its socket does, also in the middle of a task, so none
outlives the conversion.
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
from penstock.feed.convert.tasks import Bench, Task, result_of

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from penstock.feed.convert.worker import main; main()"
)
_GRACE_S = 2.0

Report = Callable[[int, int], None]
"""Is told of samples and bytes that were dealt with."""


class Deal:
    """Tasks for some workers: each has a stretch of neighbours, and takes from the longest one left when it is done.

    >>> deal = Deal([0, 1, 2, 3, 4, 5], 2)
    >>> [deal.next(who) for who in (0, 1, 0, 0, 0, 1, 0)]
    [0, 3, 1, 2, 5, 4, None]
    """

    def __init__(self, tasks: Sequence[Any], workers: int) -> None:
        cuts = [len(tasks) * worker // workers for worker in range(workers + 1)]
        self._stacks = [deque(tasks[first:stop]) for first, stop in pairwise(cuts)]

    def next(self, worker: int) -> Any:
        """Return a worker's next task; None where all are given out."""
        own = self._stacks[worker]
        if own:
            return own.popleft()
        longest = max(self._stacks, key=len)
        half = [longest.pop() for _ in range((len(longest) + 1) // 2)]
        own.extend(reversed(half))
        return own.popleft() if own else None


class Crew:
    """Some worker processes, or none: then this process does the work.

    Args:
        workers: how many.
        lock: a descriptor that they keep open.
    """

    def __init__(self, workers: int, lock: int | None = None) -> None:
        self._wanted = workers
        self._lock = lock
        self._workers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._bench: Bench | None = None

    def run(self, tasks: Sequence[Task], report: Report) -> Iterator[tuple[Task, Any]]:
        """Do all tasks; yield each with its result, as they are done.

        Raises:
            WorkerError: a worker died.
            PenstockError: a task raised it.
        """
        if self._wanted == 0:
            yield from self._alone(tasks, report)
            return
        if not tasks:
            return
        self._start(min(self._wanted, len(tasks)))
        deal = Deal(tasks, len(self._workers))
        under_way: dict[Connection, tuple[int, Task]] = {}
        for number in range(len(self._workers)):
            self._give(number, deal, under_way)
        while under_way:
            for ready in wait(list(under_way)):
                assert isinstance(ready, Connection)
                number, task = under_way[ready]
                kind, value = self._heard(number, task)
                if kind == "progress":
                    report(*value)
                elif kind == "done":
                    del under_way[ready]
                    yield task, value
                    self._give(number, deal, under_way)
                else:
                    raise value

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        if self._bench is not None:
            self._bench.close()
            self._bench = None
        for _, channel in self._workers:
            channel.close()
        for process, _ in self._workers:
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._workers.clear()

    def _alone(self, tasks: Sequence[Task], report: Report) -> Iterator[tuple[Task, Any]]:
        self._bench = self._bench or Bench(report)
        self._bench.report = report
        for task in tasks:
            yield task, result_of(task, self._bench)

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

    def _give(self, number: int, deal: Deal, under_way: dict[Connection, tuple[int, Task]]) -> None:
        task = deal.next(number)
        if task is None:
            return
        channel = self._workers[number][1]
        under_way[channel] = (number, task)
        try:
            channel.send_bytes(pickle.dumps(task))
        except OSError:  # it is dead, which is heard when it is listened to
            return

    def _heard(self, number: int, task: Task) -> tuple[str, Any]:
        process, channel = self._workers[number]
        try:
            kind, value = channel.recv()
        except (EOFError, OSError):
            code = process.wait()
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            hint = "; the kernel kills when memory runs out: use fewer workers" if code == -signal.SIGKILL else ""
            raise WorkerError(f"a worker {how} during {type(task).__name__.lower()} {task.number}{hint}") from None
        return kind, value
