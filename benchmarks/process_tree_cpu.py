"""The CPU time of a process and of all processes that it has started."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from penstock.observe.meters.host_memory import descendants


def cpu_s() -> float:
    """Return the CPU time so far of this process, of its descendants that are alive, and of children that have ended.

    A difference of two is the time of all that ran between them, as long as who ended was waited for.
    """
    own, ended = time.process_time_ns(), os.times()
    for pid in descendants(os.getpid()):
        with suppress(OSError):  # it has just ended
            own += time.clock_gettime_ns(_clock_of(pid))
    return own / 1e9 + ended.children_user + ended.children_system


def _clock_of(pid: int) -> int:
    """Return the number of a process's clock, as `clock_getcpuclockid` does; it has threads that have ended as well."""
    return ~pid << 3 | 2
