"""A task, the context that a worker runs it in, and the main function of a worker process.

A task can be repeated: it leaves complete files, or none that count.
"""

from __future__ import annotations

import errno
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeAlias, TypeVar

import torch

from penstock.core.errors import PenstockError, SourceError, WorkerError
from penstock.data.convert.numbered_records import RecordReader, SourceSpec

T = TypeVar("T")

_REPORT_S = 0.1

ReportProgress = Callable[[int, int], None]
"""Called with numbers of samples and bytes that were processed."""


class TaskContext:
    """What a worker keeps between tasks: the sources that it has opened, and progress that it has not reported.

    Args:
        report: called with the samples and bytes since the last report.
    """

    def __init__(self, report: ReportProgress) -> None:
        self.report = report
        self._readers: dict[str, RecordReader] = {}
        self._samples = 0
        self._nbytes = 0
        self._reported_at = 0.0

    def reader(self, spec: SourceSpec) -> RecordReader:
        """Return the reader of a source, opened once."""
        key = repr(spec)
        if key not in self._readers:
            self._readers[key] = RecordReader(spec)
        return self._readers[key]

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
        """Close the sources."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


Call: TypeAlias = Callable[[TaskContext], T]
"""What a task does: a function of a module, or a partial of one, so that it can be pickled to a worker."""

Task = tuple[str, int, Call[Any]]
"""What a task does, for error messages, as in "writing segment"; its number among the tasks of its kind; its call."""


def run_task(context: TaskContext, action: str, number: int, call: Call[Any]) -> Any:
    """Return what a task's call returns.

    Raises:
        SourceError: also for errors of the operating system: a full disk, a file that may not be read.
    """
    try:
        result = call(context)
    except OSError as error:
        hint = "; free some room on it, and repeat the command to resume" if error.errno == errno.ENOSPC else ""
        raise SourceError(f"{action} {number}: {error}{hint}") from error
    context.flush()
    return result


# ── a worker process ────────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    """Run tasks from the socket whose descriptor is the last argument, and send back results, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C interrupts the conversion, which stops its workers
    torch.set_num_threads(1)
    channel = Connection(int(sys.argv[-1]))
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, tasks), daemon=True).start()
    context = TaskContext(lambda samples, nbytes: channel.send(("progress", (samples, nbytes))))
    while True:
        outcome = _outcome(context, *tasks.get())
        try:
            channel.send(outcome)
        except OSError:  # the conversion has ended
            os._exit(0)


def _listen(channel: Connection, tasks: queue.SimpleQueue[Task]) -> None:
    try:
        while True:
            tasks.put(channel.recv())
    except (EOFError, OSError):
        os._exit(0)  # also in the middle of a task: an incomplete file is discarded later


def _outcome(context: TaskContext, action: str, number: int, call: Call[Any]) -> tuple[str, Any]:
    try:
        return "done", run_task(context, action, number, call)
    except PenstockError as error:
        return "failed", error
    except Exception as error:  # noqa: BLE001 - where a worker ends
        failure = WorkerError(f"{type(error).__name__} while {action} {number}: {error}")
        failure.add_note(traceback.format_exc())
        return "failed", failure
