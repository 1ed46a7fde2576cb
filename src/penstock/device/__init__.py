"""Devices that batches are copied to: the host (`cpu`), torch's accelerators, CUDA, and a simulated one."""

from penstock.device.base import Device, Event, Registration, TensorSpec
from penstock.device.choose import device_of
from penstock.device.sim import Sim

__all__ = ["Device", "Event", "Registration", "Sim", "TensorSpec", "device_of"]
