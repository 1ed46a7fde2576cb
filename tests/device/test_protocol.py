"""Every device has all of the protocol at run time. (mypy checks it where `device/choose.py` returns each of them.)"""

from __future__ import annotations

import inspect

import pytest
import torch

from penstock.device import Device, Sim, TensorSpec
from penstock.device.accelerator import Accelerator
from penstock.device.cpu import Cpu
from penstock.device.cuda import Cuda

METHODS = [name for name in vars(Device) if not name.startswith("_")]
ATTRIBUTES = list(inspect.get_annotations(Device))


def test_the_protocol_has_methods_and_attributes() -> None:
    assert {"empty", "upload", "download", "record_event", "wait_event", "register", "fence"} <= set(METHODS)
    assert {"name", "torch_device", "is_host", "has_fence", "can_register"} == set(ATTRIBUTES)


@pytest.mark.parametrize("device", [Cpu, Accelerator, Cuda, Sim])
@pytest.mark.parametrize("name", METHODS)
def test_every_device_has_each_method_with_the_same_parameters(device: type, name: str) -> None:
    wanted = inspect.signature(getattr(Device, name)).parameters
    assert [*inspect.signature(getattr(device, name)).parameters] == [*wanted]


@pytest.mark.parametrize("device", [Cpu(), Sim()], ids=["cpu", "sim"])
def test_every_device_has_each_attribute(device: Device) -> None:
    for name in ATTRIBUTES:
        assert hasattr(device, name), name


@pytest.mark.parametrize("device", [Cpu(), Sim()], ids=["cpu", "sim"])
def test_a_batch_comes_back_from_a_device_as_it_went(device: Device) -> None:
    back, source = torch.zeros(4), torch.arange(4.0)
    with device.outside_capture():
        there = device.empty(TensorSpec.of(source))
        device.wait_event(device.upload([(there, source)], device.record_event()))
        device.download([(back, there)]).synchronize()
    assert torch.equal(back, source)
