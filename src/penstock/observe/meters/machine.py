"""Describes the machine of a run, as far as it explains the run's figures."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from penstock.core.host import total_nbytes


def describe_machine() -> dict[str, str | int]:
    """Return the processor, cores, memory, system and accelerators of this machine.

    Accelerators appear only if the program has initialized CUDA: this function must not initialize it.

    >>> sorted(describe_machine())[:3]
    ['cores', 'memory_nbytes', 'processor']
    """
    found: dict[str, str | int] = {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "memory_nbytes": total_nbytes(),
        "system": f"{platform.system()} {platform.release()}",
    }
    names = _accelerators()
    if names:
        found["accelerators"] = ", ".join(names)
    return found


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _accelerators() -> list[str]:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return []
    return [str(cuda.get_device_name(number)) for number in range(cuda.device_count())]
