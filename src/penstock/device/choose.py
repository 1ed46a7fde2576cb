"""device_of: the device that a name stands for."""

from __future__ import annotations

import functools

import torch

from penstock.core.errors import OptionError
from penstock.device.accelerator import Accelerator
from penstock.device.base import Device
from penstock.device.cpu import Cpu
from penstock.device.cuda import cuda_device
from penstock.device.sim import Sim


def device_of(wanted: str | torch.device | Device) -> Device:
    """Return the device for `wanted`: "cpu", "cuda", "cuda:1", "sim", any accelerator of torch, or a Device itself.

    Raises:
        OptionError: this machine has no such device.

    Example:
        >>> device_of("cpu").name
        'cpu'
    """
    if not isinstance(wanted, (str, torch.device)):
        if not hasattr(wanted, "is_host"):
            raise OptionError(
                f"device={wanted!r} is not a device: give a name as in 'cuda:1', a torch.device, or a "
                "penstock.device.Device"
            )
        return wanted
    if str(wanted) == "sim":
        return _shared_sim()
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise OptionError(f"device={wanted!r} is not a device: {str(error).splitlines()[0]}") from error
    if device.type == "cpu":
        return Cpu()
    present = torch.accelerator.current_accelerator(check_available=True)
    if present is None or present.type != device.type:
        raise OptionError(
            f"device={str(wanted)!r} was asked for and there is "
            f"{f'only {present.type!r}' if present else 'no accelerator'} here; "
            "use device='cpu', or device='sim' for a simulated one"
        )
    if (device.index or 0) >= torch.accelerator.device_count():
        raise OptionError(
            f"device={str(wanted)!r} was asked for and there are {torch.accelerator.device_count()} devices here"
        )
    wanted_index: int | None = device.index
    return _accelerator(device.type, torch.accelerator.current_device_index() if wanted_index is None else wanted_index)


@functools.cache
def _accelerator(kind: str, index: int) -> Device:
    """Make each device once, because it has its own streams."""
    device = torch.device(kind, index)
    return cuda_device(device) if kind == "cuda" else Accelerator(device)


@functools.cache
def _shared_sim() -> Sim:
    return Sim()
