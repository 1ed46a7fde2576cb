"""The machine and the versions that figures were made with; nothing that names a host, a person or a folder."""

from __future__ import annotations

import multiprocessing as mp
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import penstock

PEER_PACKAGES = (
    "torchdata",
    "spdl-core",
    "grain",
    "datasets",
    "litdata",
    "mosaicml-streaming",
    "nvidia-dali-cuda120",
    "ffcv",
    "tensorflow-cpu",
)
PACKAGES = ("penstock", "torch", "numpy", "pillow", *PEER_PACKAGES, "s3fs", "transformers", "accelerate", "deepspeed")


def facts() -> dict[str, str | int | float]:
    """Return what a reader needs to compare figures."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "start_method": mp.get_context().get_start_method(),
        "date": datetime.now(UTC).date().isoformat(),
        **{package: found for package in PACKAGES if (found := _version(package))},
    }


def facts_with_gpu() -> dict[str, str | int | float]:
    """Return also what GPU there is; this begins to use it."""
    if not torch.cuda.is_available():
        return {**facts(), "gpu": "none"}
    return {**facts(), "gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda or "?", "driver": _driver()}


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split("  ")[1]
    except (OSError, IndexError):
        return "unknown"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    if package == "penstock":  # it may be on the path without being installed
        return penstock.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return None
