"""Copies of a model, its optimizer and a batch, in which a step can run without changing the originals.

Fake copies hold no bytes and lie on the fake CPU, so neither a GPU nor memory is needed. Real copies lie where the
originals do.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.optim import Optimizer

from penstock.core.tree import map_leaves
from penstock.memory.optimizer.joined_optimizers import optimizers_of

Copies = tuple[nn.Module, Optimizer | None, Any]
"""Model, optimizer and batch."""


@contextlib.contextmanager
def real_copies(model: nn.Module, optimizer: Optimizer | None, batch: Any) -> Iterator[Copies]:
    """Yield real copies, and restore the random state afterwards."""
    copies = copy.deepcopy((model, optimizer, batch))
    with torch.random.fork_rng(enabled=True):
        yield copies


@contextlib.contextmanager
def fake_copies(model: nn.Module, optimizer: Optimizer | None, batch: Any) -> Iterator[Copies]:
    """Yield fake copies on the CPU, in the mode in which they can be used."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        model, optimizer, batch = copy.deepcopy((model, optimizer, batch))
    with mode, torch.random.fork_rng(devices=()):
        _select_device_implementation(optimizer)
        _move_to_fake_cpu(model, optimizer)
        yield model, optimizer, map_leaves(_on_cpu, batch)


def _select_device_implementation(optimizer: Optimizer | None) -> None:
    """Select the implementation that the optimizer would choose on an accelerator, if its parameters are there."""
    for group in optimizer.param_groups if optimizer is not None else ():
        on_device = any(p.device.type not in ("cpu", "meta") for p in group["params"])
        if on_device and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def _move_to_fake_cpu(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Replace fake tensors of other devices: autograd on them needs the device's own build of torch."""
    replaced: dict[int, Tensor] = {}

    def moved(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or tensor.device.type == "cpu":
            return tensor
        if id(tensor) not in replaced:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            is_param = isinstance(tensor, nn.Parameter)
            replaced[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_param else empty
        return replaced[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: moved(tensor) for name, tensor in held.items()})
    for one in optimizers_of(optimizer):
        for group in one.param_groups:
            group["params"] = [moved(param) for param in group["params"]]
        states = {moved(p): {k: moved(v) for k, v in state.items()} for p, state in one.state.items()}
        one.state.clear()
        one.state.update(states)


def _on_cpu(leaf: Any) -> Any:
    if callable(getattr(leaf, "to", None)):
        return leaf.to("cpu")
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        fields = [field.name for field in dataclasses.fields(leaf) if field.init]
        return replace(leaf, **{name: map_leaves(_on_cpu, getattr(leaf, name)) for name in fields})
    return leaf
