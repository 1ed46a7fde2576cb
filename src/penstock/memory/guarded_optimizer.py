"""An optimizer whose own `step` survives an out-of-memory, for loops that call it themselves."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.memory.explain import explain_failure
from penstock.memory.optimizer.optimizer_transaction import StepTransaction
from penstock.memory.optimizer.resume_optimizer import PartialStepError
from penstock.memory.recovery.out_of_memory import FailureLog, OutOfMemoryError, retry

_guarded: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def guard_optimizer(optimizer: Optimizer, model: nn.Module, log: FailureLog) -> None:
    """Let `optimizer.step` be tried until it is done, once; a wrapper of Accelerate's or Fabric's is looked through.

    A closure is called before the step, as torch's optimizers do. LBFGS, and other optimizers that are given a closure,
    step as they are.

    Args:
        optimizer: of a framework, or of torch's kind.
        model: for a description of a failure.
        log: of the failures of the training step; once there are any, optimizers that are not torch's step from copies.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> guard_optimizer(optimizer, model, FailureLog())
        >>> optimizer.step()
    """
    while type(optimizer).__module__.startswith(("accelerate.", "lightning.", "pytorch_lightning.")):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    if optimizer in _guarded or isinstance(optimizer, torch.optim.LBFGS):
        return
    _guarded.add(optimizer)
    transaction = StepTransaction(optimizer, log=log)
    before: Callable[..., Any] = optimizer.step
    function = getattr(before, "__func__", before)

    @functools.wraps(function)
    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None and not type(self).__module__.startswith("torch.optim"):
            return before(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        outer = self.__dict__["step"]  # a scheduler, for one, wraps it once more
        self.step = before  # type: ignore[method-assign]
        try:
            failure = retry(transaction.step, log).failure
        except PartialStepError as error:
            raise OutOfMemoryError(
                f"the optimizer's step failed in its middle ({error}), and its weights and moments are inconsistent "
                "now; go back to a checkpoint"
            ) from error
        finally:
            self.step = outer  # type: ignore[method-assign]
        if failure is not None:
            raise OutOfMemoryError(f"the optimizer's step: {explain_failure(failure, model, self)}")
        return loss

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
