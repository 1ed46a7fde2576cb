"""The live view: one line about the loop under way, on a terminal; a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from penstock.core.stats import LoaderStatistics
from penstock.observe import rates, report
from penstock.observe.host_memory import MemoryMeter
from penstock.observe.terminal import StatusRow
from penstock.observe.watch import Watch, WatchedLoader

_STDERR = 2
_TERMINAL_S = 0.25
_PLAIN_S = 5.0
_MEMORY_S = 2.0


class LiveView:
    """A thread that looks at the loaders, shows the busiest, and keeps the peak of memory.

    It is started when there is a loader: Python warns who forks beside a thread, and many a script has no loader.

    Args:
        watch: the loaders.
        memory: told to look every two seconds.
        quiet: whether to show nothing.
    """

    def __init__(self, watch: Watch, memory: MemoryMeter, *, quiet: bool) -> None:
        self._watch = watch
        self._memory = memory
        self._quiet = quiet
        self._row = StatusRow(_STDERR) if not quiet and StatusRow.fits(_STDERR) else None
        self._stop = threading.Event()
        self._before: dict[WatchedLoader, LoaderStatistics] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look, unless it has begun."""
        if self._thread is None and not self._stop.is_set():
            thread = threading.Thread(target=self._run, name="penstock-live", daemon=True)
            with contextlib.suppress(RuntimeError):  # Python starts no thread when its main one has ended
                thread.start()
                self._thread = thread

    def stop(self) -> None:
        """Take the line away and look no more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._row is not None:
            self._row.close()

    def _run(self) -> None:
        period = _TERMINAL_S if self._row is not None else _PLAIN_S
        next_line, next_look = time.monotonic() + period, time.monotonic() + 0.5
        while not self._stop.wait(max(0.0, min(next_line, next_look) - time.monotonic())):
            now = time.monotonic()
            if now >= next_look:
                self._memory.look()
                next_look = time.monotonic() + _MEMORY_S
            if now >= next_line:
                self._show()
                next_line = now + period

    def _show(self) -> None:
        if self._quiet:
            return
        line = self._line()
        if line is None:
            return
        with contextlib.suppress(OSError):  # the terminal or the log has gone; the program goes on
            if self._row is not None:
                self._row.show(f"penstock │ {line}")
            else:
                os.write(_STDERR, f"penstock: {line}\n".encode())  # past Python's locks, as `StatusRow` does

    def _line(self) -> str | None:
        """Return a line about the loader that handed out most lately, None when none did."""
        busiest: tuple[int, WatchedLoader, LoaderStatistics, LoaderStatistics] | None = None
        for loader in list(self._watch.loaders):
            now = loader.statistics()
            recent = rates.since(self._before.get(loader, LoaderStatistics()), now)
            self._before[loader] = now
            if recent.batches and (busiest is None or recent.samples > busiest[0]):
                busiest = recent.samples, loader, now, recent
        if busiest is None:
            return None
        _, loader, now, recent = busiest
        return report.progress(loader.name, now, recent)
