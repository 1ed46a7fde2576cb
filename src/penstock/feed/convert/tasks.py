"""What a worker is given to do, and what it has at hand.

Each task can be repeated: it leaves whole files, or none that count.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.core.errors import SourceError
from penstock.feed.convert.reading import Reader, Recipe

_REPORT_S = 0.1


@dataclass(slots=True)
class Bench:
    """What a worker has at hand: the sources it has opened, and a way to report progress."""

    report: Callable[[int, int], None]
    """Is told samples and bytes since the last report."""
    readers: dict[Recipe, Reader] = field(default_factory=dict)
    _samples: int = 0
    _nbytes: int = 0
    _at: float = 0.0

    def reader(self, recipe: Recipe) -> Reader:
        """Return the reader of a source, opened once."""
        if recipe not in self.readers:
            self.readers[recipe] = Reader(recipe)
        return self.readers[recipe]

    def count(self, samples: int, nbytes: int) -> None:
        """Note progress; it is reported some times a second."""
        self._samples += samples
        self._nbytes += nbytes
        now = time.monotonic()
        if now - self._at > _REPORT_S:
            self.flush()
            self._at = now

    def flush(self) -> None:
        """Report what is noted."""
        if self._samples or self._nbytes:
            self.report(self._samples, self._nbytes)
            self._samples = self._nbytes = 0

    def close(self) -> None:
        """Close the sources."""
        for reader in self.readers.values():
            reader.close()
        self.readers.clear()


class Task(Protocol):
    """A piece of work; travels to a worker, and its result back."""

    @property
    def number(self) -> int:
        """Which of its kind it is."""

    def run(self, bench: Bench) -> Any:
        """Do it."""


def result_of(task: Task, bench: Bench) -> Any:
    """Return a task's result.

    Raises:
        SourceError: also where the system refuses something: a full disk, a file that may not be read.
    """
    try:
        result = task.run(bench)
    except OSError as error:
        hint = "; free some room on it, and the same command goes on" if error.errno == errno.ENOSPC else ""
        raise SourceError(f"{type(task).__name__.lower()} {task.number}: {error}{hint}") from error
    bench.flush()
    return result
