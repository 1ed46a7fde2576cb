"""What an out-of-memory that reaches the user says."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.core.errors import PenstockError
from penstock.memory.failure import Failure


class OutOfMemoryError(PenstockError, torch.OutOfMemoryError):
    """Memory ran out, and smaller parts were of no help. Its text says what would have."""


def explain(failure: Failure, model: nn.Module, optimizer: Optimizer) -> str:
    return failure.text
