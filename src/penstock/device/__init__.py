"""What the machine can do with batches: host memory (`cpu`), torch's accelerators, CUDA, and a simulated one."""

from penstock.device.base import Device, Event, Mould, Registration
from penstock.device.choose import device_of
from penstock.device.sim import Sim

__all__ = ["Device", "Event", "Mould", "Registration", "Sim", "device_of"]
