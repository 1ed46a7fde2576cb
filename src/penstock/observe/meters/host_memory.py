"""Measures the host memory of this process and its descendants, from /proc.

RSS counts a page that n processes share n times. PSS (proportional set size) counts an n-th of it for each, so that the
PSS of several processes adds up. The kernel walks all pages to compute it, so it must not be read often.
Source: the kernel's Documentation/filesystems/proc.rst on smaps_rollup and VmHWM.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_PERIOD_S = 2.0
_CPU_FRACTION, _INITIAL_CPU_S = 1 / 800, 0.1
"""Measurements use at most this fraction of a core after an initial allowance; a process of 200 MiB costs 10 ms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """The peak of a run's host memory."""

    peak_pss_nbytes: int | None = None
    """Largest sum over this process and its descendants in one measurement; None where there is no /proc."""

    peak_rss_nbytes: int = 0
    """Peak resident memory of this process alone."""

    processes: int = 1
    """Most processes in one measurement, this one included."""


class MemoryMeter:
    """Measures memory now and then, and keeps the peak."""

    def __init__(self) -> None:
        self._peak_pss_nbytes: int | None = None
        self._processes = 1
        self._began, self._due, self._spent_s = time.monotonic(), 0.0, 0.0
        self._unrelated: set[int] = set()
        self.latest_nbytes: int | None = None
        """Sum over all processes in the last measurement; None where there is no /proc."""

    def measure(self) -> None:
        """Measure every process of this run. Costs some milliseconds for each large one."""
        family = [os.getpid(), *descendants(os.getpid(), self._unrelated)]
        sizes = [nbytes for nbytes in map(pss_nbytes, family) if nbytes is not None]
        if sizes:
            self.latest_nbytes = sum(sizes)
            self._peak_pss_nbytes = max(self._peak_pss_nbytes or 0, self.latest_nbytes)
            self._processes = max(self._processes, len(sizes))

    def measure_if_due(self) -> None:
        """Measure, at most every two seconds, and less often where a measurement takes long."""
        now = time.monotonic()
        if now < self._due or self._spent_s > _INITIAL_CPU_S + _CPU_FRACTION * (now - self._began):
            return
        began = time.thread_time()
        self.measure()
        self._spent_s += time.thread_time() - began
        self._due = now + _PERIOD_S

    def peak(self) -> HostMemory:
        """Return the peak so far."""
        return HostMemory(
            peak_pss_nbytes=self._peak_pss_nbytes, peak_rss_nbytes=peak_rss_nbytes(), processes=self._processes
        )


def descendants(pid: int, unrelated: set[int] | None = None) -> list[int]:
    """Return the processes that `pid` started, those that they started, and so on; empty where there is no /proc.

    Args:
        pid: the process.
        unrelated: for repeated calls: processes that earlier calls found not to be descendants. They are not read
            again while they live; this call adds what it finds. With a hundred of them a call takes a twentieth of
            the time.
    """
    everyone = {int(entry) for entry in os.listdir(_PROC) if entry.isdigit()} if _PROC.is_dir() else set()
    if unrelated is None:
        unrelated = set()
    unrelated &= everyone
    children: dict[int, list[int]] = {}
    for one in everyone - unrelated:
        if (parent := _parent(one)) is not None:
            children.setdefault(parent, []).append(one)
    found: list[int] = []
    generation = [pid]
    while generation:
        generation = [child for parent in generation for child in children.get(parent, [])]
        found += generation
    unrelated |= everyone.difference(found, [pid])
    return found


def pss_nbytes(pid: int) -> int | None:
    """Return the proportional set size of `pid`; None if it has ended or belongs to another user."""
    try:
        rollup = (_PROC / str(pid) / "smaps_rollup").read_bytes()
    except OSError:
        return None
    for line in rollup.splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return None


def peak_rss_nbytes() -> int:
    """Return the peak resident memory of this process; 0 on Windows, where Python does not tell it."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _parent(pid: int) -> int | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[1])  # the command name before the bracket may hold spaces and brackets
