"""The kernel's counters of a process or a thread, read from /proc. None, or nothing, where they are not there.

Sources: the kernel's Documentation/filesystems/proc.rst (io, smaps_rollup, stat), scheduler/sched-stats.rst
(schedstat).
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_LIBRARIES = {
    "libgomp": "openmp",
    "libomp": "openmp",
    "libiomp5": "openmp",
    "libopenblas": "openblas",
    "libscipy_openblas": "openblas",
    "libmkl_rt": "mkl",
    "libopencv_core": "opencv",
    "cv2.abi": "opencv",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadCounters:
    """What this process has read so far."""

    requested_nbytes: int
    """By system calls, from the page cache or from a disk."""

    disk_nbytes: int
    """From a disk."""

    major_faults: int
    """Page faults that read from a disk."""

    def since(self, before: ReadCounters) -> ReadCounters:
        """Return what was read since `before`."""
        return ReadCounters(
            requested_nbytes=self.requested_nbytes - before.requested_nbytes,
            disk_nbytes=self.disk_nbytes - before.disk_nbytes,
            major_faults=self.major_faults - before.major_faults,
        )


def read_counters() -> ReadCounters | None:
    """Return what this process has read so far."""
    try:
        io = dict(line.split(": ") for line in (_PROC / "self/io").read_text().splitlines())
        faults = (_PROC / "self/stat").read_text().rpartition(")")[2].split()[9]
        return ReadCounters(
            requested_nbytes=int(io["rchar"]), disk_nbytes=int(io["read_bytes"]), major_faults=int(faults)
        )
    except (OSError, ValueError, KeyError, IndexError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadTimes:
    """How one thread has spent its time so far, in seconds."""

    wall_s: float
    """By the clock."""

    ran_s: float
    """On a processor."""

    queued_s: float
    """Runnable, while others had the processor."""

    @property
    def busy_s(self) -> float:
        """Wall-clock time without that in the run queue: what it would have taken on an idle machine."""
        return max(0.0, self.wall_s - self.queued_s)

    @property
    def asleep_s(self) -> float:
        """Time in which the thread neither ran nor was runnable."""
        return max(0.0, self.wall_s - self.ran_s - self.queued_s)


def thread_times() -> ThreadTimes:
    """Return how this thread has spent its time so far: the clocks are read last."""
    queued_s = _queued_s()
    return ThreadTimes(wall_s=time.perf_counter(), ran_s=time.thread_time(), queued_s=queued_s)


def thread_times_since(before: ThreadTimes) -> ThreadTimes:
    """Return how this thread has spent its time since `thread_times`: the clocks are read first.

    Reading the time in the run queue takes as long as many a sample.
    """
    wall_s, ran_s = time.perf_counter(), time.thread_time()
    return ThreadTimes(
        wall_s=wall_s - before.wall_s, ran_s=ran_s - before.ran_s, queued_s=_queued_s() - before.queued_s
    )


def _queued_s() -> float:
    try:
        # schedstat's first figure, the time on a processor, is updated at scheduler ticks only; the clock is exact.
        return int((_PROC / "thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class ProcessorUsage:
    """What is used of the processors from its creation on."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), busy_s(), own_s()

    def others_cores(self) -> float | None:
        """Return how many cores others used, on average: what was used, without this process and its children."""
        began, before_s, before_own_s = self._began
        now_s = busy_s()
        if before_s is None or now_s is None:
            return None
        others_s = now_s - before_s - (own_s() - before_own_s)
        return max(0.0, others_s / max(1.0, time.perf_counter() - began))


def busy_s() -> float | None:
    """Return how long the processors that this process may use have been busy, added up over them."""
    try:
        names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in (_PROC / "stat").read_text().splitlines()]
        # user, nice, system, idle, iowait, irq, softirq
        ticks = [sum(int(words[column]) for column in (1, 2, 3, 6, 7)) for words in lines if words[0] in names]
        return sum(ticks) / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError, IndexError):
        return None


def own_s() -> float:
    """Return the processor time of this process and of all its descendants, with those that have ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in _PROC.glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(words[1])
        ticks[int(folder.name)] = sum(map(int, words[11:15]))  # its own, and that of children it has waited for
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


def private_nbytes(pid: int | str = "self") -> int | None:
    """Return the bytes of a process's dirty private pages, which it shares with no other."""
    try:
        rollup = (_PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Private_Dirty:")), None
    )


def thread_ticks(pid: int) -> dict[int, int]:
    """Return the clock ticks that each thread of a process has run."""
    found = {}
    try:
        threads = os.listdir(_PROC / str(pid) / "task")
    except OSError:
        return {}
    for thread in threads:
        try:
            words = (_PROC / str(pid) / "task" / thread / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[int(thread)] = int(words[11]) + int(words[12])
    return found


def runnable_s(pid: int) -> float:
    """Return how long the threads of a process have used a processor or waited for one, added up over them."""
    total_ns = 0
    for file in (_PROC / str(pid) / "task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            total_ns += sum(map(int, file.read_text().split()[:2]))
    return total_ns / 1e9


def threading_libraries(pid: int) -> tuple[str, ...]:
    """Return which libraries with thread pools a process has loaded."""
    try:
        maps = (_PROC / str(pid) / "maps").read_text()
    except OSError:
        return ()
    return tuple(sorted({name for part, name in _LIBRARIES.items() if part in maps}))
