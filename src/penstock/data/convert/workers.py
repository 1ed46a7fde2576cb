"""The worker processes of a conversion: each runs one task at a time; contiguous tasks go to the same worker.

A worker is a new Python process that inherits only one end of a socket and the conversion's lock. The program's
`__main__` is not imported, so a script needs no guard. A worker exits when its socket is closed, also in the middle of
a task, so none outlives the conversion. A task can be repeated: it leaves complete files, or none that count.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias, TypeVar

import torch

from penstock.core.errors import PenstockError, SourceError, WorkerError
from penstock.core.interpreter import arguments_of

T = TypeVar("T")

_REPORT_S = 0.1
_AHEAD = 2
"""Calls that are begun for each worker before their results are taken in order."""
_MAIN = "from penstock.data.convert.workers import main; main()"


class Context:
    """What a process keeps between tasks: what it has opened, and progress that it has not reported.

    Args:
        report: called with the samples and bytes since the last report.
    """

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self.report = report
        self._kept: dict[str, Any] = {}
        self._samples = self._nbytes = 0
        self._reported_at = 0.0

    def kept(self, key: str, make: Callable[[], T]) -> T:
        """Return what `make` makes, the first time that it is asked for."""
        if key not in self._kept:
            self._kept[key] = make()
        found: T = self._kept[key]
        return found

    def count(self, samples: int, nbytes: int) -> None:
        """Count progress, and report it at most every 0.1 s."""
        self._samples += samples
        self._nbytes += nbytes
        now = time.monotonic()
        if now - self._reported_at > _REPORT_S:
            self.flush()
            self._reported_at = now

    def flush(self) -> None:
        """Report progress that is not reported yet."""
        if self._samples or self._nbytes:
            self.report(self._samples, self._nbytes)
            self._samples = self._nbytes = 0

    def close(self) -> None:
        """Close what was opened."""
        while self._kept:
            self._kept.popitem()[1].close()


Call: TypeAlias = Callable[[Context], T]
"""What a task does: a function of a module, or a partial of one, so that it can be pickled to a worker."""


def _run(context: Context, what: str, call: Call[T]) -> T:
    """Return what a task's call returns; `what` it does is for errors of the operating system, as of a full disk."""
    try:
        result = call(context)
    except OSError as error:
        hint = "; free some room on it, and repeat the command to resume" if error.errno == errno.ENOSPC else ""
        raise SourceError(f"{what}: {error}{hint}") from error
    context.flush()
    return result


class _Tasks:
    """Tasks for some workers: each has a queue of contiguous tasks; when it is empty, it takes half of the longest one.

    >>> tasks = _Tasks(6, 2)
    >>> [tasks.next(who) for who in (0, 1, 0, 0, 0, 1, 0)]
    [0, 3, 1, 2, 5, 4, None]
    """

    def __init__(self, count: int, workers: int) -> None:
        ends = [count * worker // workers for worker in range(workers + 1)]
        self._queues = [deque(range(first, stop)) for first, stop in pairwise(ends)]

    def next(self, worker: int) -> int | None:
        """Return a worker's next task; None if none is left."""
        own = self._queues[worker]
        if not own:
            longest = max(self._queues, key=len)
            own.extendleft([longest.pop() for _ in range((len(longest) + 1) // 2)])
        return own.popleft() if own else None


class WorkerPool:
    """Worker processes; with none, tasks run in this process.

    Args:
        count: how many.
        report: called with the samples and bytes that were processed since the last call.
        lock: a descriptor that they keep open; None for none.
    """

    def __init__(self, count: int, report: Callable[[int, int], None], lock: int | None = None) -> None:
        self.count = count
        self._report = report
        self._lock = lock
        self._workers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self.context = Context(report)
        """Of this process."""

    def run(self, action: str, calls: Sequence[Call[T]]) -> list[T]:
        """Return what the calls return, in their order; `action` is what they do, for error messages.

        Raises:
            WorkerError: a worker has died.
        """
        count = min(self.count, len(calls))
        if count == 0:
            return [_run(self.context, f"{action} {number}", call) for number, call in enumerate(calls)]
        tasks = _Tasks(len(calls), count)
        results = dict(self._results(action, calls, count, tasks.next))
        return [results[number] for number in range(len(calls))]

    def run_in_order(self, action: str, calls: Sequence[Call[T]]) -> Iterator[T]:
        """Yield what the calls return, in their order; few are begun before the results of those before are taken."""
        count, begun, taken = min(self.count, len(calls)), 0, 0
        results: dict[int, T] = {}

        def take(_: int) -> int | None:
            nonlocal begun
            if begun == min(len(calls), taken + _AHEAD * count):
                return None
            begun += 1
            return begun - 1

        for number, value in self._results(action, calls, count, take):
            results[number] = value
            while taken in results:
                yield results.pop(taken)
                taken += 1

    def _results(
        self, action: str, calls: Sequence[Call[T]], count: int, take: Callable[[int], int | None]
    ) -> Iterator[tuple[int, T]]:
        """Yield numbers of calls and what they return, in any order; `take` says which one a worker does next."""
        while len(self._workers) < count:
            self._workers.append(self._start())
        under_way: dict[Connection, tuple[int, int]] = {}
        idle = set(range(count))
        while True:
            for worker in sorted(idle):
                if (number := take(worker)) is None:
                    continue
                idle.remove(worker)
                channel = self._workers[worker][1]
                under_way[channel] = worker, number
                with contextlib.suppress(OSError):  # it is dead: `_receive` raises
                    channel.send_bytes(pickle.dumps((f"{action} {number}", calls[number])))
            if not under_way:
                return
            for ready in wait(list(under_way)):
                assert isinstance(ready, Connection)
                worker, number = under_way[ready]
                kind, value = self._receive(worker, f"{action} {number}")
                if kind == "progress":
                    self._report(*value)
                elif kind == "done":
                    del under_way[ready]
                    idle.add(worker)
                    yield number, value
                else:
                    raise value

    def close(self) -> None:
        """Stop the workers, also in the middle of a task."""
        self.context.close()
        for process, channel in self._workers:
            channel.close()
            process.kill()  # what it has not finished does not count
            process.wait()
        self._workers.clear()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        with theirs:
            inherited = (theirs.fileno(),) if self._lock is None else (theirs.fileno(), self._lock)
            command = [sys.executable, *arguments_of(_MAIN, str(theirs.fileno()))]
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited, process_group=0)
            except OSError as error:
                ours.close()
                raise WorkerError(f"a worker process could not be started: {error}") from error
        return process, Connection(ours.detach())

    def _receive(self, worker: int, doing: str) -> tuple[str, Any]:
        process, channel = self._workers[worker]
        try:
            kind, value = channel.recv()
        except (EOFError, OSError):
            code = process.wait()
            end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            memory = "; the kernel kills processes when memory runs out: use fewer workers"
            raise WorkerError(f"a worker {end} while {doing}{memory if code == -signal.SIGKILL else ''}") from None
        return kind, value


# ── a worker process ────────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    """Run tasks from the socket whose descriptor is the last argument, and send back results, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C interrupts the conversion, which stops its workers
    torch.set_num_threads(1)
    channel = Connection(int(sys.argv[-1]))
    tasks: queue.SimpleQueue[tuple[str, Call[Any]]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, tasks), daemon=True).start()
    context = Context(lambda samples, nbytes: channel.send(("progress", (samples, nbytes))))
    while True:
        outcome = _outcome(context, *tasks.get())
        try:
            channel.send(outcome)
        except OSError:  # the conversion has ended
            os._exit(0)


def _listen(channel: Connection, tasks: queue.SimpleQueue[tuple[str, Call[Any]]]) -> None:
    try:
        while True:
            tasks.put(channel.recv())
    except (EOFError, OSError):
        os._exit(0)  # also in the middle of a task: an incomplete file is discarded later


def _outcome(context: Context, what: str, call: Call[Any]) -> tuple[str, Any]:
    try:
        return "done", _run(context, what, call)
    except PenstockError as error:
        return "failed", error
    except Exception as error:  # noqa: BLE001 - where a worker ends
        failure = WorkerError(f"{type(error).__name__} while {what}: {error}")
        failure.add_note(traceback.format_exc())
        return "failed", failure
