"""How much host memory this process and its descendants take, read from /proc.

RSS counts a page that n processes share n times. PSS (proportional set size) counts it once, an n-th for each, so the
PSS of all processes may be added up; the kernel walks all pages for it, which is why looks must not be frequent.
Source: the kernel's Documentation/filesystems/proc.rst on smaps_rollup and VmHWM.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_PERIOD_S = 2.0
_SHARE, _HEAD_START_S = 1 / 800, 0.1
"""Looks take at most this share of a core after a head start; one takes 10 ms for each process of 200 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """The most host memory that a run was seen to take."""

    peak_pss_nbytes: int | None = None
    """The most that this process and its descendants took together in one look; None where there is no /proc."""

    peak_rss_nbytes: int = 0
    """The most that was ever resident of this process alone."""

    processes: int = 1
    """The most processes in one look, this one included."""


class MemoryMeter:
    """Remembers the peak of all `look`s."""

    def __init__(self) -> None:
        self._peak_pss_nbytes: int | None = None
        self._processes = 1
        self._began, self._due, self._spent_s = time.monotonic(), 0.0, 0.0
        self._strangers: set[int] = set()
        self.latest_nbytes: int | None = None
        """What the last look saw, all processes together; None where there is no /proc."""

    def look(self) -> None:
        """Look once at every process of this run. Costs some milliseconds for each that is large."""
        family = [os.getpid(), *descendants(os.getpid(), self._strangers)]
        sizes = [nbytes for nbytes in map(pss_nbytes, family) if nbytes is not None]
        if sizes:
            self.latest_nbytes = sum(sizes)
            self._peak_pss_nbytes = max(self._peak_pss_nbytes or 0, self.latest_nbytes)
            self._processes = max(self._processes, len(sizes))

    def look_if_due(self) -> None:
        """Look, if that is not too soon after the last time: two seconds, and longer where looks take long."""
        now = time.monotonic()
        if now < self._due or self._spent_s > _HEAD_START_S + _SHARE * (now - self._began):
            return
        began = time.thread_time()
        self.look()
        self._spent_s += time.thread_time() - began
        self._due = now + _PERIOD_S

    def peak(self) -> HostMemory:
        """Return the most that was seen so far."""
        return HostMemory(
            peak_pss_nbytes=self._peak_pss_nbytes, peak_rss_nbytes=peak_rss_nbytes(), processes=self._processes
        )


def descendants(pid: int, strangers: set[int] | None = None) -> list[int]:
    """Return the processes that `pid` started, those that they started, and so on; empty where there is no /proc.

    Args:
        pid: the process.
        strangers: for who looks again and again: processes that earlier looks found to be none of these. They are
            not read again while they live, and what this look finds is added. With a hundred strangers that makes a
            look twenty times as fast.
    """
    everyone = {int(entry) for entry in os.listdir(_PROC) if entry.isdigit()} if _PROC.is_dir() else set()
    if strangers is None:
        strangers = set()
    strangers &= everyone
    children: dict[int, list[int]] = {}
    for one in everyone - strangers:
        if (parent := _parent(one)) is not None:
            children.setdefault(parent, []).append(one)
    found: list[int] = []
    generation = [pid]
    while generation:
        generation = [child for parent in generation for child in children.get(parent, [])]
        found += generation
    strangers |= everyone.difference(found, [pid])
    return found


def pss_nbytes(pid: int) -> int | None:
    """Return the proportional set size of `pid`, or None when it cannot be told (it has ended, it is not ours)."""
    try:
        rollup = (_PROC / str(pid) / "smaps_rollup").read_bytes()
    except OSError:
        return None
    for line in rollup.splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return None


def cpu_s(pid: int) -> float:
    """Return the seconds that a process has run, its ended children left out; 0 where that cannot be told."""
    try:
        words = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def peak_rss_nbytes() -> int:
    """Return the most that was ever resident of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _parent(pid: int) -> int | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[1])  # the name before the bracket may hold anything
