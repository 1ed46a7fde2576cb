"""How busy NVIDIA GPUs are, by the driver's own count. The one file that imports pynvml (nvidia-ml-py).

Source: NVML API reference, nvmlDeviceGetUtilizationRates: the share of the last sample period (up to a second) in which
a kernel ran. Nothing here makes a CUDA context.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_DRIVER = Path("/proc/driver/nvidia/version")


class Nvml:
    """NVML, opened. To be made where no other thread forks: pynvml loads its library under a lock."""

    def __init__(self, pynvml: ModuleType) -> None:
        self._pynvml = pynvml

    @classmethod
    def open(cls) -> Nvml | None:
        """Return NVML, or None where there is no NVIDIA driver or no library for it."""
        if not _DRIVER.exists():
            return None
        try:
            import pynvml  # type: ignore[import-untyped]
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            nvml = cls(pynvml)
            # Every function that is used later is looked up now, under pynvml's lock.
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            nvml.busy([pynvml.nvmlDeviceGetUUID(handle)])
        except pynvml.NVMLError:
            return None
        return nvml

    def busy(self, uuids: Sequence[str]) -> float | None:
        """Return the mean share of time in which these GPUs ran something, between 0 and 1; None if none can tell.

        Args:
            uuids: as in "GPU-6ac4d2b5-...".
        """
        shares = []
        for uuid in uuids:
            try:
                handle = self._pynvml.nvmlDeviceGetHandleByUUID(uuid)
                shares.append(self._pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
            except self._pynvml.NVMLError:  # a part of a GPU (MIG) is not counted, nor one that has been lost
                continue
        return sum(shares) / len(shares) if shares else None
