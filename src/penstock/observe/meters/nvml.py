"""Reads how busy NVIDIA GPUs are. The one file that imports pynvml (nvidia-ml-py).

Source: NVML API reference, nvmlDeviceGetUtilizationRates: the share of the last sample period (up to a second) in which
a kernel ran. NVML creates no CUDA context.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def missing_package() -> str | None:
    """Return what to install for the utilization of this machine's NVIDIA GPUs; None if nothing is missing."""
    if find_spec("pynvml") is not None or not _has_driver():
        return None
    return 'the utilization of the GPU was not measured: nvidia-ml-py is not installed: pip install "penstock[gpu]"'


class Nvml:
    """An open NVML. Must be created where no other thread forks: pynvml loads its library under a lock."""

    def __init__(self, pynvml: ModuleType) -> None:
        self._pynvml = pynvml

    @classmethod
    def open(cls) -> Nvml | None:
        """Return NVML, or None where there is no NVIDIA driver, or nvidia-ml-py is not installed."""
        if not _has_driver():
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
        found = []
        for uuid in uuids:
            with contextlib.suppress(self._pynvml.NVMLError):  # MIG instances and lost GPUs do not report it
                found.append(self._pynvml.nvmlDeviceGetUtilizationRates(self._handle(uuid)).gpu / 100)
        return sum(found) / len(found) if found else None

    def _handle(self, uuid: str) -> Any:
        """Return NVML's handle. CUDA tells the UUID of a MIG instance without saying that it is one."""
        try:
            return self._pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._pynvml.NVMLError:
            return self._pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid.removeprefix('GPU-')}")


def _has_driver() -> bool:
    """Return whether there is an NVML to load: WSL and some containers have one, and no /proc/driver/nvidia."""
    try:
        ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return False
    return True
