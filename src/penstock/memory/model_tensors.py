"""Tensors of a model and its optimizer: which there are, on which devices, and which share a storage."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from penstock.distributed.rank_group import local_tensor

LossFunction = Callable[[nn.Module, Any], tuple[Tensor, Any]]
"""`(model, batch) -> (sum of losses, how many they are)`."""

_class: Any = Tensor
_params_of, _set_grad = operator.itemgetter("params"), _class.grad.__set__


def accelerators_of(model: nn.Module) -> list[torch.device]:
    """Return the accelerators that parameters are on."""
    return sorted({p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}, key=str)


def drop_gradients(optimizer: Optimizer) -> None:
    """Do what `optimizer.zero_grad` does, without the operations with which it records itself in a profile."""
    params = chain.from_iterable(map(_params_of, optimizer.param_groups))
    deque(map(_set_grad, params, repeat(None)), maxlen=0)  # a loop that is C


def drop_input_gradients(batch: Any) -> None:
    """Drop the gradients of a batch's own tensors, where a loss asks for them."""
    for one in tree_leaves(batch):
        if isinstance(one, Tensor) and one.is_leaf and one.requires_grad:
            one.grad = None


def state_tensors(optimizer: Optimizer | None, params: Iterable[Tensor] | None = None) -> list[Tensor]:
    """Return the tensors of an optimizer's state: of these parameters, or of all."""
    if optimizer is None:
        return []
    states = optimizer.state.values() if params is None else [optimizer.state.get(param, {}) for param in params]
    return [local_tensor(value) for state in states for value in state.values() if isinstance(value, Tensor)]


def storage_key(tensor: Tensor) -> int:
    """Return a key of the storage of `tensor`, unique while it lives; of the tensor itself if it has no storage."""
    own = local_tensor(tensor)
    key: int = own.untyped_storage()._cdata if own.layout is torch.strided else own._cdata
    return key
