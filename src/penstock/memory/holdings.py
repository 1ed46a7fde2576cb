"""What a model and its optimizer hold: which tensors, where they lie, and what tells one's memory from another's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.distributed.peers import local

LossFunction = Callable[[nn.Module, Any], tuple[Tensor, Any]]
"""`(model, batch) -> (sum of losses, how many they are)`."""


def accelerators_of(model: nn.Module) -> list[torch.device]:
    """Return the devices that parameters lie on, but the CPU."""
    return sorted({p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}, key=str)


def drop_gradients(optimizer: Optimizer) -> None:
    """Do what `optimizer.zero_grad` does, without the operations that it takes to note that in a profile."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


def state_tensors(optimizer: Optimizer | None, params: Iterable[Tensor] | None = None) -> list[Tensor]:
    """Return the tensors of an optimizer's state: of these parameters, or of all."""
    if optimizer is None:
        return []
    states = optimizer.state.values() if params is None else [optimizer.state.get(param, {}) for param in params]
    return [local(value) for state in states for value in state.values() if isinstance(value, Tensor)]


def storage_key(tensor: Tensor) -> int:
    """Return what tells the storage of `tensor` from others, as long as it lives; one that has none tells itself."""
    own = local(tensor)
    key: int = own.untyped_storage()._cdata if own.layout is torch.strided else own._cdata
    return key
