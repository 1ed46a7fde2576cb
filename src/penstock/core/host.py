"""What this process may use of the machine: cores by affinity and cgroup quota, memory by cgroup limit.

Sources: the kernel's cgroup-v2 (`cpu.max`, `memory.max`, `memory.current`) and cgroup-v1 documentation.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from penstock.core.ranks import Ranks

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return how many cores this process can keep busy, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota_cores())))


def cores_of_rank() -> int:
    """Return how many cores this rank can keep busy: a part, where this machine's ranks may use all of its cores."""
    cores, all_cores = usable_cores(), os.cpu_count() or 1
    has_its_own = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < all_cores
    ranks = 1 if has_its_own else Ranks.of(os.environ, os.getppid()).local_world_size
    return max(1, cores // ranks)


def available_nbytes() -> int:
    """Return the bytes of memory that this process could still take."""
    return max(0, min(_free_nbytes(), _cgroup_free_nbytes()))


def total_nbytes() -> int:
    """Return the bytes of memory of this machine; 0 where Python does not tell it (Windows)."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def resident_nbytes() -> int:
    """Return how much memory this process occupies now, its resident set; 0 where there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def private_nbytes(pid: int) -> int | None:
    """Return the memory that a process shares with no other; None if it has ended, or the system does not tell."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    return sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Private_"))


def pinnable_nbytes() -> int:
    """Return the bytes of host memory that may reasonably be page-locked: half of what is left to this process.

    Page-locked memory cannot be swapped out or reclaimed, so a full machine or cgroup kills processes.
    RLIMIT_MEMLOCK is ignored, because NVIDIA's driver locks pages past it. Where a driver does obey it, it refuses, and
    the warning has the limit.
    """
    return available_nbytes() // 2


def memlock_nbytes() -> float:
    """Return RLIMIT_MEMLOCK, the bytes that this process may lock; infinite where there is no limit."""
    try:
        import resource
    except ImportError:
        return math.inf
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return math.inf if limit == resource.RLIM_INFINITY else limit


def _quota_cores() -> float:
    quota, period = _words(_CGROUP / "cpu.max", 2)
    if not quota:
        quota = (_words(_CGROUP / "cpu/cpu.cfs_quota_us", 1))[0]
        period = (_words(_CGROUP / "cpu/cpu.cfs_period_us", 1))[0]
    if not quota or quota in ("max", "-1") or not period:
        return math.inf
    return int(quota) / int(period)


def _free_nbytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):  # macOS, Windows
        return 4 << 30


def _cgroup_free_nbytes() -> int:
    limit, used = _words(_CGROUP / "memory.max", 1)[0], _words(_CGROUP / "memory.current", 1)[0]
    if not limit:
        limit = _words(_CGROUP / "memory/memory.limit_in_bytes", 1)[0]
        used = _words(_CGROUP / "memory/memory.usage_in_bytes", 1)[0]
    if not limit or limit == "max" or not used:
        return 1 << 62
    return int(limit) - int(used)


def _words(path: Path, count: int) -> list[str]:
    """Return the first `count` words of a file, empty ones where there is no such file."""
    try:
        words = path.read_text().split()
    except OSError:
        words = []
    return [*words[:count], *[""] * (count - len(words))]
