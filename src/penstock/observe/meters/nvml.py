"""Reads the utilization of NVIDIA GPUs from the driver. The one file that imports pynvml (nvidia-ml-py).

Source: NVML API reference, nvmlDeviceGetUtilizationRates: the share of the last sample period (up to a second) in which
a kernel ran. NVML creates no CUDA context.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_DRIVER = Path("/proc/driver/nvidia/version")


def missing_package() -> str | None:
    """Return what to install for the utilization of this machine's NVIDIA GPUs; None if nothing is missing."""
    if not _DRIVER.exists() or find_spec("pynvml") is not None:
        return None
    return 'the utilization of the GPU was not measured: nvidia-ml-py is not installed: pip install "penstock[gpu]"'


class Nvml:
    """An open NVML. Must be created where no other thread forks: pynvml loads its library under a lock."""

    def __init__(self, pynvml: ModuleType) -> None:
        self._pynvml = pynvml

    @classmethod
    def open(cls) -> Nvml | None:
        """Return NVML, or None where there is no NVIDIA driver, or nvidia-ml-py is not installed."""
        if not _DRIVER.exists():
            return None
        try:
            import pynvml  # type: ignore[import-untyped]
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            nvml = cls(pynvml)
            # Looks up every function that is used later now, because pynvml does that under its lock.
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            nvml.utilization([pynvml.nvmlDeviceGetUUID(handle)])
        except pynvml.NVMLError:
            return None
        return nvml

    def utilization(self, uuids: Sequence[str]) -> float | None:
        """Return the mean utilization of these GPUs, between 0 and 1; None if none reports it.

        Args:
            uuids: as in "GPU-6ac4d2b5-...".
        """
        fractions = []
        for uuid in uuids:
            try:
                handle = self._pynvml.nvmlDeviceGetHandleByUUID(uuid)
                fractions.append(self._pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
            except self._pynvml.NVMLError:  # MIG instances and lost GPUs report none
                continue
        return sum(fractions) / len(fractions) if fractions else None
