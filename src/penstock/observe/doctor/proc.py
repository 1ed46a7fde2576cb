"""What the kernel counted of a process or a thread, read from /proc. None, or nothing, where it does not tell.

Sources: the kernel's Documentation/filesystems/proc.rst (io, smaps_rollup, stat, wchan), scheduler/sched-stats.rst
(schedstat).
"""

from __future__ import annotations

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
class Reading:
    """What this process has read so far."""

    asked_nbytes: int
    """By system calls, wherever it came from."""

    missed_nbytes: int
    """From the disk."""

    major_faults: int
    """Page faults that read from a disk."""


def reading() -> Reading | None:
    """Return what this process has read so far."""
    try:
        io = dict(line.split(": ") for line in (_PROC / "self/io").read_text().splitlines())
        faults = (_PROC / "self/stat").read_text().rpartition(")")[2].split()[9]
        return Reading(asked_nbytes=int(io["rchar"]), missed_nbytes=int(io["read_bytes"]), major_faults=int(faults))
    except (OSError, ValueError, KeyError, IndexError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Where one thread's time has gone so far, in seconds."""

    wall_s: float
    ran_s: float
    """On a processor."""
    queued_s: float
    """Wanting to run, while others did."""


def moment() -> Moment:
    """Return where this thread's time has gone so far."""
    try:
        # The kernel brings a running thread's first figure up to date only now and then; the clock is exact.
        queued_s = int((_PROC / "thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        queued_s = 0.0
    return Moment(wall_s=time.perf_counter(), ran_s=time.thread_time(), queued_s=queued_s)


def private_nbytes(pid: int | str = "self") -> int | None:
    """Return the bytes that a process has written and shares with nobody."""
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


def waits_for_itself(pid: int) -> bool:
    """Say whether all threads of a process wait for threads or processes: for a lock, a condition, a barrier."""
    try:
        threads = list((_PROC / str(pid) / "task").iterdir())
        return bool(threads) and all("futex" in (thread / "wchan").read_text() for thread in threads)
    except OSError:
        return False


def threading_libraries(pid: int) -> tuple[str, ...]:
    """Return which libraries that bring threads of their own a process has loaded."""
    try:
        maps = (_PROC / str(pid) / "maps").read_text()
    except OSError:
        return ()
    return tuple(sorted({name for part, name in _LIBRARIES.items() if part in maps}))
