"""to_bf16: parameters, gradients and the optimizer's state in bfloat16, half of their bytes.

Results differ from those in float32: bfloat16 has 8 bits for a number's digits, so updates below 1/256 of a weight (and
of a moment that decays by 0.999) are lost by rounding. Buffers keep their types: statistics, tables of angles.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.memory.optimizer.joined_optimizers import optimizers_of


@torch.no_grad()
def to_bf16(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Convert a model's float32 parameters and the optimizer's state in place; parameters stay the same objects.

    >>> layer = nn.Linear(2, 2)
    >>> to_bf16(layer)
    >>> layer.weight.dtype
    torch.bfloat16
    """
    for param in model.parameters():
        param.data = _converted(param.data)
        if param.grad is not None:
            param.grad = _converted(param.grad)
    for one in optimizers_of(optimizer):
        for state in one.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    state[name] = _converted(value)


def _converted(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.dtype is torch.float32 else tensor
