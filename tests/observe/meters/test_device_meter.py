"""Device memory is asked of torch, and how busy a GPU is of NVML, once the program uses one. (Stand-ins for both.)"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.observe.meters import nvml
from penstock.observe.meters.device_meter import DeviceMeter


class NvmlError(Exception):
    pass


def driver(busy: dict[str, int]) -> Any:
    """Return an NVML with these GPUs and how busy they are, in percent."""

    def handle_of(uuid: str) -> str:
        if uuid not in busy:
            raise NvmlError
        return uuid

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: list(busy)[index],
        nvmlDeviceGetUUID=lambda handle: handle,
        nvmlDeviceGetHandleByUUID=handle_of,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=busy[handle]),
    )


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> dict[str, Any]:
    """Stand in for a machine of three GPUs, of which the program uses the last two."""
    state = {"initialized": False, "used": [0, 5, 7], "reserved": [0, 10, 20]}
    monkeypatch.setitem(__import__("sys").modules, "pynvml", driver({"GPU-a": 3, "GPU-b": 40, "GPU-c": 80}))
    (tmp_path / "version").touch()
    monkeypatch.setattr(nvml, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda index: state["used"][index])
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda index: state["reserved"][index])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: state["initialized"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="abc"[index]))
    return state


def test_the_gpus_that_hold_memory_are_the_ones_whose_work_counts(gpus: dict[str, Any]) -> None:
    meter = DeviceMeter()
    gpus["initialized"] = True
    reading = meter.read()
    assert (reading.nbytes, reading.reserved_nbytes, reading.utilization) == (12, 30, pytest.approx(0.6))


def test_nothing_is_asked_of_an_accelerator_that_the_program_has_not_begun_to_use(gpus: dict[str, Any]) -> None:
    assert DeviceMeter().read().nbytes is None


def test_a_gpu_without_a_utilization_still_reports_its_memory(gpus: dict[str, Any]) -> None:
    gpus["initialized"] = True
    gpus["reserved"] = [0, 0, 0]
    reading = DeviceMeter().read()
    assert (reading.nbytes, reading.utilization) == (12, None)


def test_without_a_driver_there_is_no_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(nvml, "_DRIVER", tmp_path / "no")
    assert nvml.Nvml.open() is None
