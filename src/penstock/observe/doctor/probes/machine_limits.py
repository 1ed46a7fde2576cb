"""The limits of the machine, and of the container that this process runs in."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from penstock.observe.doctor.measurements import Machine
from penstock.observe.doctor.probes import proc

CGROUP = Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")


class MachineLimits:
    """Reads the limits; what the control group throttled is counted from the creation of this object.

    Args:
        cgroup: where the kernel shows the control group of this process.
        shm: the file system into which torch's workers put their batches.
    """

    def __init__(self, cgroup: Path = CGROUP, shm: Path = _SHM) -> None:
        self._cgroup = cgroup
        self._shm = shm
        self._throttled_s = self._throttled()
        self._load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        self._usage = proc.ProcessorUsage()

    def measure(self) -> Machine:
        """Return the limits, and how long the control group has throttled this process."""
        shm = self._shm_sizes()
        return Machine(
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            quota_cores=self._quota(),
            load=self._load,
            others_cores=self._usage.others_cores(),
            intra_op_threads=torch.get_num_threads(),
            throttled_s=max(0.0, self._throttled() - self._throttled_s),
            shm_nbytes=shm[0],
            shm_free_nbytes=shm[1],
            accelerator=_accelerator(),
        )

    def _quota(self) -> float | None:
        """Return the quota in cores: cgroup-v2's cpu.max, or the two files of cgroup v1."""
        words = self._words("cpu.max") or [
            *self._words("cpu/cpu.cfs_quota_us"),
            *self._words("cpu/cpu.cfs_period_us"),
        ]
        if len(words) < 2 or words[0] in ("max", "-1"):
            return None
        return int(words[0]) / int(words[1])

    def _throttled(self) -> float:
        for file, key, unit_s in (("cpu.stat", "throttled_usec", 1e-6), ("cpu/cpu.stat", "throttled_time", 1e-9)):
            words = self._words(file)
            if key in words:
                return int(words[words.index(key) + 1]) * unit_s
        return 0.0

    def _shm_sizes(self) -> tuple[int | None, int | None]:
        try:
            shm = os.statvfs(self._shm)
        except OSError:
            return None, None
        return shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize

    def _words(self, file: str) -> list[str]:
        try:
            return (self._cgroup / file).read_text().split()
        except OSError:
            return []


def _accelerator() -> str:
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return here.type if here is not None else ""
