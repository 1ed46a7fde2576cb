"""What worker processes do while a loop runs: how many threads of each use a processor, and how long they sleep."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from penstock.loader.workers.busy_time import thread_times
from penstock.observe.doctor.probe_results import WorkerActivity
from penstock.observe.doctor.probes import proc

_BUSY_THREAD = 0.3
"""Of the busiest thread's ticks: a thread with less only waits for the busiest one."""
_WORKER_TICKS = 10
"""Clock ticks: a worker that ran for less (0.1 s) cannot be judged."""


class WorkerActivityProbe:
    """Adds up the clock ticks of all threads of all workers, over windows in which the loop runs unchanged."""

    def __init__(self) -> None:
        self._ran: dict[int, dict[int, int]] = {}
        self._before: dict[int, dict[int, int]] = {}
        self._times_before: dict[int, tuple[int, int]] = {}
        self._asleep_s: dict[int, float] = {}
        self._made_s = 0.0
        self._runnable_before: dict[int, float] = {}
        self._runnable_s: dict[int, float] = {}
        self._libraries: tuple[str, ...] = ()
        self._began = 0.0
        self._measured_s = 0.0

    def start(self, pids: Sequence[int]) -> None:
        """Begin a window with these workers."""
        self._began = time.perf_counter()
        self._before = {pid: proc.thread_ticks(pid) for pid in pids}
        self._runnable_before = {pid: proc.runnable_s(pid) for pid in pids}
        self._times_before = {pid: times for pid in pids if (times := thread_times(str(pid))) is not None}

    def stop(self) -> None:
        """End the window."""
        passed_s = time.perf_counter() - self._began
        self._measured_s += passed_s if self._before else 0.0
        for pid, times in self._times_before.items():
            now = thread_times(str(pid))
            if now is not None:  # neither on a core nor waiting for one
                self._made_s += (now[0] - times[0]) / 1e9
                asleep_s = passed_s - (sum(now) - sum(times)) / 1e9
                self._asleep_s[pid] = self._asleep_s.get(pid, 0.0) + max(0.0, asleep_s)
        for pid, before_s in self._runnable_before.items():  # threads that have ended are not counted
            runnable_s = max(0.0, proc.runnable_s(pid) - before_s)
            self._runnable_s[pid] = self._runnable_s.get(pid, 0.0) + runnable_s
        for pid, before in self._before.items():
            ran = self._ran.setdefault(pid, {})
            for thread, ticks in proc.thread_ticks(pid).items():
                ran[thread] = ran.get(thread, 0) + ticks - before.get(thread, 0)
            self._libraries = self._libraries or proc.threading_libraries(pid)
        self._before, self._times_before, self._runnable_before = {}, {}, {}

    def result(self) -> WorkerActivity | None:
        """Return the activity; None if no worker was observed."""
        used = [sum(ran.values()) / os.sysconf("SC_CLK_TCK") for ran in self._ran.values()]
        busy = [
            sum(ticks > _BUSY_THREAD * max(ran.values()) for ticks in ran.values())
            for ran in self._ran.values()
            if sum(ran.values()) >= _WORKER_TICKS
        ]
        if not self._ran:
            return None
        return WorkerActivity(
            workers=len(self._ran),
            asleep_fraction=min(self._asleep_s.values(), default=0.0) / max(1e-9, self._measured_s),
            busy_threads=sum(busy) / max(1, len(busy)),  # of those that ran for long enough
            cores=max(used) / max(1e-9, self._measured_s),
            making_cores=self._made_s / max(1e-9, self._measured_s),
            runnable_threads=max(self._runnable_s.values(), default=0.0) / max(1e-9, self._measured_s),
            libraries=self._libraries,
        )
