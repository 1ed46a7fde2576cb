"""The progress of a conversion, on stderr: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.feed.convert import Progress

_PLAIN_S = 5.0


@contextmanager
def shown(*, quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """Give what shows progress; None where it is to be `quiet`."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        bar = _Bar()
        with bar.drawn:
            yield bar.show
    else:
        yield _Lines().show


class _Lines:
    """Shows a line every few seconds, for logs."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def show(self, progress: Progress) -> None:
        """Print a line, if it is time for one."""
        now = time.monotonic()
        if now - self._at < _PLAIN_S:
            return
        self._at = now
        of = "" if progress.total is None else f" of {progress.total}"
        print(f"penstock: {progress.stage}, {progress.samples}{of} samples", file=sys.stderr, flush=True)


class _Bar:
    """Shows a bar in the terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.drawn = Bar(
            TextColumn("{task.description:<9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self.drawn.add_task("looking", total=None, speed="")
        self._stage, self._began, self._first = "", time.monotonic(), 0

    def show(self, progress: Progress) -> None:
        """Draw it as it is now."""
        if progress.stage != self._stage:
            self._stage, self._began, self._first = progress.stage, time.monotonic(), progress.samples
            self.drawn.reset(self._task, total=progress.total, description=progress.stage, speed="")
        passed = max(time.monotonic() - self._began, 1e-3)
        speed = f"{(progress.samples - self._first) / passed:.0f} samples/s, {progress.nbytes / passed / 1e6:.1f} MB/s"
        self.drawn.update(self._task, completed=progress.samples, total=progress.total, speed=speed)
