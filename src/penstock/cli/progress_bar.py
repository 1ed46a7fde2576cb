"""Shows the progress of a conversion on stderr: a bar in a terminal, a line every five seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.data.convert import Progress

_LINE_PERIOD_S = 5.0


@contextmanager
def progress_reporter(*, quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """Yield a function that shows a conversion's progress; None if `quiet`."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        bar = _Bar()
        with bar.widget:
            yield bar.show
    else:
        yield _Lines().show


class _Lines:
    """Prints a line every few seconds, for logs."""

    def __init__(self) -> None:
        self._printed_at = time.monotonic()

    def show(self, progress: Progress) -> None:
        """Print a line, if one is due."""
        now = time.monotonic()
        if now - self._printed_at < _LINE_PERIOD_S:
            return
        self._printed_at = now
        total = "" if progress.total is None else f" of {progress.total}"
        print(f"penstock: {progress.stage}, {progress.samples}{total} samples", file=sys.stderr, flush=True)


class _Bar:
    """Shows a bar in the terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.widget = Bar(
            TextColumn("{task.description:<9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self.widget.add_task("scanning", total=None, speed="")
        self._stage, self._began, self._first_sample = "", time.monotonic(), 0

    def show(self, progress: Progress) -> None:
        """Update the bar."""
        if progress.stage != self._stage:
            self._stage, self._began, self._first_sample = progress.stage, time.monotonic(), progress.samples
            self.widget.reset(self._task, total=progress.total, description=progress.stage, speed="")
        elapsed_s = max(time.monotonic() - self._began, 1e-3)
        rate = (progress.samples - self._first_sample) / elapsed_s
        speed = f"{rate:.0f} samples/s, {progress.nbytes / elapsed_s / 1e6:.1f} MB/s"
        self.widget.update(self._task, completed=progress.samples, total=progress.total, speed=speed)
