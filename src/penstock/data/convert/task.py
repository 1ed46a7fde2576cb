"""A task, the context that a worker runs it in, and how errors of the operating system are translated.

A task can be repeated: it leaves complete files, or none that count.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import SourceError
from penstock.data.convert.numbered_records import RecordReader, SourceSpec

_REPORT_S = 0.1


class TaskContext:
    """What a worker keeps between tasks: the sources that it has opened, and progress that it has not reported.

    Args:
        report: called with the samples and bytes since the last report.
    """

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self.report = report
        self._readers: dict[SourceSpec, RecordReader] = {}
        self._samples = 0
        self._nbytes = 0
        self._reported_at = 0.0

    def reader(self, spec: SourceSpec) -> RecordReader:
        """Return the reader of a source, opened once."""
        if spec not in self._readers:
            self._readers[spec] = RecordReader(spec)
        return self._readers[spec]

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


@dataclass(frozen=True, slots=True)
class Task:
    """A unit of work. It is pickled to a worker, which calls `function` once and pickles its result back."""

    action: str
    """What it does, for error messages, as in "writing segment"."""
    number: int
    """Its number among the tasks of its kind."""
    function: Callable[..., Any]
    """Called with the worker's context and the arguments; of a module, so that it can be pickled."""
    arguments: dict[str, Any]


def run_task(task: Task, context: TaskContext) -> Any:
    """Return a task's result.

    Raises:
        SourceError: also for errors of the operating system: a full disk, a file that may not be read.
    """
    try:
        result = task.function(context, **task.arguments)
    except OSError as error:
        hint = "; free some room on it, and repeat the command to resume" if error.errno == errno.ENOSPC else ""
        raise SourceError(f"{task.action} {task.number}: {error}{hint}") from error
    context.flush()
    return result
