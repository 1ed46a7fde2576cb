"""What worker processes do while a loop runs: how many threads of each use a processor, or that they all hang."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence

from penstock.observe.doctor import proc
from penstock.observe.examination import Hang, WorkerLook

_BUSY = 0.3
_LEAST_TICKS = 10
_HANGS_S = 3.0


class Crew:
    """Looks at workers while the loop runs as it is."""

    def __init__(self) -> None:
        self._ran: dict[int, dict[int, int]] = {}
        self._before: dict[int, dict[int, int]] = {}
        self._libraries: tuple[str, ...] = ()
        self._looked_s = 0.0

    def begin(self, pids: Sequence[int]) -> None:
        """Look at them before a stretch."""
        self._began = time.perf_counter()
        self._before = {pid: proc.thread_ticks(pid) for pid in pids}

    def end(self) -> None:
        """Look at them after it, and add up what each of their threads did."""
        self._looked_s += time.perf_counter() - self._began if self._before else 0.0
        for pid, before in self._before.items():
            ran = self._ran.setdefault(pid, {})
            for thread, ticks in proc.thread_ticks(pid).items():
                ran[thread] = ran.get(thread, 0) + ticks - before.get(thread, 0)
            self._libraries = self._libraries or proc.threading_libraries(pid)
        self._before = {}

    def look(self) -> WorkerLook | None:
        """Return what was seen; None when workers hardly ran."""
        used = [sum(ran.values()) / os.sysconf("SC_CLK_TCK") for ran in self._ran.values()]
        busy = [
            sum(ticks > _BUSY * max(ran.values()) for ticks in ran.values())
            for ran in self._ran.values()
            if sum(ran.values()) >= _LEAST_TICKS
        ]
        if not busy:
            return None
        return WorkerLook(
            workers=len(busy),
            busy_threads=sum(busy) / len(busy),
            cores=max(used) / max(1e-9, self._looked_s),
            libraries=self._libraries,
        )


class HangWatch:
    """Looks at workers while the loop waits for them, again and again: do they wait for one another?

    One that sleeps, reads or computes does not hang, and where the kernel does not say what a thread waits for, none
    does.
    """

    def __init__(self) -> None:
        self._seen: list[dict[int, int]] = []
        self._since = math.inf

    def look(self, pids: Sequence[int], now: float, waited_s: float) -> Hang | None:
        """Return the hang, once all threads of all workers have waited, and not run, for some seconds."""
        seen = [proc.thread_ticks(pid) for pid in pids]
        if not any(seen) or seen != self._seen or not all(map(proc.waits_for_itself, pids)):
            self._seen, self._since = seen, now
            return None
        if now - self._since < _HANGS_S:
            return None
        return Hang(workers=len(pids), waited_s=waited_s, libraries=proc.threading_libraries(pids[0]))
