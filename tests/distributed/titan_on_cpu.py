"""torchtitan 0.3.0 on CPUs, with torch 2.13: to be imported before its other modules.

It is for accelerators, and stops without one where it chooses the device, and where it measures the device's memory: so
it gets torch.cpu for its device, with figures that are made up for its log. It takes a function of a later torch, too.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule

torchtitan.tools.utils.device_type = "cpu"
torchtitan.tools.utils.device_module = types.SimpleNamespace(
    set_device=torch.cpu.set_device,
    device_count=torch.cpu.device_count,
    synchronize=torch.cpu.synchronize,
    current_device=lambda: 0,
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    get_device_name=lambda device: "CPU",
    memory_stats=lambda device: {},
    get_device_properties=lambda device: types.SimpleNamespace(total_memory=1 << 30),
)
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = distributed_c10d._set_pg_timeout


def use_sums_only(models: Iterable[nn.Module]) -> None:
    """Have FSDP2 add up gradients and divide them apart: gloo has no operation that does both."""
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def take_microbatches(schedule: Any) -> None:
    """Have a pipeline's schedule take microbatches that are cut already, as that of a later torch does."""

    def step(*, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any, **others: Any) -> None:
        for stage in schedule._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, loss_kwargs=loss_kwargs, **others)

    schedule.step = step
