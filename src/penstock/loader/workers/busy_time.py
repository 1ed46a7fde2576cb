"""How much of the time that a batch took was computing rather than waiting: whether more workers than cores can gain.

Time without a core is neither: on a busy machine a worker that computes waits for one, and would look idle.
Source: the kernel's Documentation/scheduler/sched-stats.rst (/proc/<pid>/schedstat: time on a core, time waiting for
one).
"""

from __future__ import annotations

import os
import time

WAITING = 0.5
"""What computes for a smaller fraction of its time waits: then more workers than cores gain."""

WORTH_MEASURING_NS = 2_000_000
"""Batches that took less than this are not measured, because it takes 30 µs; they count as computed."""

_EVERY_NS = 10_000_000
"""Of the others one in so much of their time is measured, for the same reason; those between count like it."""


class BusyTime:
    """Measures the batches that one thread makes, one after another.

    Args:
        with_process: whether the rest of its process works for it, as threads of a decoder do in a worker process.
    """

    def __init__(self, *, with_process: bool = False) -> None:
        self.is_slow = True
        """Whether the last batch took long enough to measure the next one. Of others `begin` and `end` may be left out,
        which take a good part of a short batch's time."""
        self._unmeasured_ns = _EVERY_NS
        self._busy, self._of = 1, 1
        """What the last measurement has shown: how much of how much."""
        self._began: tuple[int, int] | None = None
        self._with_process = with_process
        self._process_ns = 0

    def begin(self) -> None:
        """Begin a batch."""
        is_due = self.is_slow and self._unmeasured_ns >= _EVERY_NS
        self._began = thread_times() if is_due else None
        self._process_ns = time.process_time_ns() if is_due and self._with_process else 0

    def end(self, passed_ns: int) -> int:
        """End a batch that took `passed_ns`; return how much of that was computing, all of it where nobody can tell."""
        self.is_slow = passed_ns >= WORTH_MEASURING_NS
        began, self._began = self._began, None
        if not self.is_slow:
            return passed_ns
        now = thread_times() if began is not None else None
        if now is None or began is None:
            self._unmeasured_ns += passed_ns
            return passed_ns * self._busy // self._of
        process_ns = time.process_time_ns() - self._process_ns if self._with_process else 0
        self._unmeasured_ns, self._of = 0, passed_ns
        self._busy = busy_part(passed_ns, max(process_ns, now[0] - began[0]), now[1] - began[1])
        return self._busy


def useful_workers(cores: int, busy: float) -> int:
    """Return how many workers that compute for this fraction of their time keep the cores busy.

    >>> useful_workers(2, 1.0), useful_workers(2, 0.1)
    (2, 20)
    """
    return int(cores / max(busy, 1e-3))


def busy_part(passed_ns: int, on_core_ns: int, without_core_ns: int) -> int:
    """Return how much of `passed_ns` would have been computing if there had always been a core.

    >>> busy_part(100, 10, 0), busy_part(100, 10, 90), busy_part(100, 10, 80)
    (10, 100, 50)
    """
    return passed_ns * on_core_ns // max(1, on_core_ns, passed_ns - without_core_ns)


def process_times(pid: int) -> tuple[int, int] | None:
    """Return how long the threads of a process have been on a core, and its main thread has waited for one."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return None
    main = thread_times(str(pid))
    times = [thread_times(f"{pid}/task/{thread}") or (0, 0) for thread in threads]
    return None if main is None else (sum(on_core for on_core, _ in times), main[1])


def thread_times(thread: str = "thread-self") -> tuple[int, int] | None:
    """Return how long a thread has been on a core, and has waited for one; None where the system does not tell.

    Args:
        thread: its folder in /proc; this thread's by default.
    """
    try:
        with open(f"/proc/{thread}/schedstat", "rb", buffering=0) as file:
            on_core, without_core = file.read(64).split()[:2]
    except (OSError, ValueError):
        return None
    return int(on_core), int(without_core)
