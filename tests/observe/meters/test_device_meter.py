"""Device memory is asked of torch, and how busy a GPU is of NVML, once the program uses one. (Stand-ins for both.)"""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock import TrainStep
from penstock.memory import live_steps
from penstock.memory.accounting import ledger
from penstock.observe.meters import nvml
from penstock.observe.meters.device_meter import DeviceMemory, DeviceMeter
from penstock.observe.record.memory_parts import device_memory_bar


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
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand in for a machine of three GPUs, of which the program uses the last two."""
    gc.collect()  # training steps of earlier tests, whose weights would be looked for on these GPUs
    state = {"initialized": False, "allocated": [0, 5, 7], "reserved": [0, 10, 20], "peak": [0, 6, 9], "asked": []}

    def stats(index: int) -> dict[str, int]:
        state["asked"].append(index)
        kinds = ("allocated", "reserved")
        found = {f"{kind}_bytes.all.{moment}": state[kind][index] for kind in kinds for moment in ("current", "peak")}
        return {**found, "allocated_bytes.all.peak": state["peak"][index], "num_alloc_retries": 1, "num_ooms": 0}

    monkeypatch.setitem(sys.modules, "pynvml", driver({"GPU-a": 3, "GPU-b": 40, "GPU-c": 80}))
    monkeypatch.setattr(nvml, "_has_driver", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "memory_stats", stats)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: state["initialized"])
    properties = [SimpleNamespace(uuid=uuid, total_memory=50) for uuid in "abc"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    return state


def test_the_gpus_that_hold_memory_are_the_ones_whose_work_counts(gpus: dict[str, Any]) -> None:
    meter = DeviceMeter()
    gpus["initialized"] = True
    reading = meter.read()
    assert (reading.nbytes, reading.reserved_nbytes, reading.utilization) == (12, 30, pytest.approx(0.6))


def test_nothing_is_asked_of_an_accelerator_that_the_program_has_not_begun_to_use(gpus: dict[str, Any]) -> None:
    assert DeviceMeter().read().nbytes is None


def test_a_gpu_without_a_utilization_still_reports_its_memory(
    gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus["initialized"] = True
    monkeypatch.setitem(sys.modules, "pynvml", driver({"GPU-a": 3}))
    reading = DeviceMeter().read()
    assert (reading.nbytes, reading.utilization) == (12, None)


def test_the_peak_is_the_largest_of_each_gpu_also_after_the_program_has_reset_it(gpus: dict[str, Any]) -> None:
    gpus["initialized"] = True
    meter = DeviceMeter()
    assert meter.peak() is None
    assert meter.read().peak_nbytes == 15
    gpus["peak"] = [0, 30, 1]
    assert meter.read().peak_nbytes == 39
    assert meter.peak() == DeviceMemory(peak_nbytes=39, peak_reserved_nbytes=30, total_nbytes=100, retries=2)


def test_gpus_that_held_no_memory_are_asked_seldom(gpus: dict[str, Any]) -> None:
    gpus["initialized"] = True
    meter = DeviceMeter()
    for _ in range(10):
        meter.read()
    assert gpus["asked"].count(0) == 1
    assert gpus["asked"].count(1) == 10


@pytest.fixture
def step() -> TrainStep:
    """Return a step that has been taken, before anything stands in for a GPU."""
    model = torch.nn.Linear(2, 1, bias=False)
    step = TrainStep(model, torch.optim.Adam(model.parameters()), lambda model, batch: (model(batch).sum(), len(batch)))
    step(torch.ones(4, 2))
    return step


def test_of_a_penstock_training_step_the_peak_is_known_by_role(
    step: TrainStep, gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_NO_ACCELERATORS", ())  # the host stands in for one
    monkeypatch.setattr(live_steps, "live_steps", {step})  # other tests' steps may live on
    gpus["initialized"] = True
    gpus["peak"] = [0, 100, 0]
    meter = DeviceMeter()
    meter.read()
    memory = meter.peak()
    assert memory is not None
    assert (memory.weights_nbytes, memory.optimizer_nbytes) == (8, 8 + 8 + 4)  # two moments, and the steps' number
    bar = device_memory_bar(memory)
    assert sum(part.amount for part in bar.parts) == memory.total_nbytes


def test_a_driver_without_the_package_for_it_is_named_with_what_to_install(
    gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.Nvml.open() is None
    assert 'pip install "penstock[gpu]"' in (nvml.missing_package() or "")
    monkeypatch.setattr(nvml, "_has_driver", lambda: False)
    assert nvml.missing_package() is None


def test_without_a_driver_there_is_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_has_driver", lambda: False)
    assert nvml.Nvml.open() is None
