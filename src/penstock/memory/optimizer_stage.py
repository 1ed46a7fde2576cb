"""OptimizerStage: the end of a window. Gradients are divided, unscaled and clipped, and the optimizer is stepped, once.

Each action is tried again if memory runs out in it. The optimizer's step is a transaction. In the actions before it
each operation is retried by itself (`RetryOps`), because an action of several operations that change gradients cannot
be begun again as a whole. Gradients that were changed in part nevertheless must be computed again:
`PartialGradientsError`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.distributed.rank_group import local_tensor
from penstock.memory.model_tensors import storage_key
from penstock.memory.optimizer.optimizer_transaction import StepTransaction, StepTransactions
from penstock.memory.recovery.out_of_memory import MAX_TRIES, Failure, FailureLog, RetryOps, attempt


class PartialGradientsError(Exception):
    """A failure has left some gradients changed and others not."""


class OptimizerStageError(Exception):
    """An action has failed again and again."""

    def __init__(self, action: str, failure: Failure) -> None:
        super().__init__(f"{action}: {failure.text}")
        self.action = action
        self.failure = failure


_Action = tuple[str, Callable[[], object], bool]
"""Its name, what runs it, and whether it is retried operation by operation."""


class OptimizerStage:
    """One optimizer step on gradients that are complete. `run` may be called again after a OptimizerStageError.

    For the GradScaler this object is the optimizer: the scaler keeps its record of an optimizer under this object, and
    has no record when gradients that were changed in part are computed again.

    Args:
        transaction: steps the optimizer.
        factor: what to multiply gradients by: a number, or a tensor on an accelerator.
        scaler: what scaled the losses, if anything did.
        clip_grad_norm: the largest total norm, if there is one.
        log: records every failure survived.
    """

    def __init__(
        self,
        transaction: StepTransaction | StepTransactions,
        *,
        factor: float | Tensor,
        scaler: torch.amp.GradScaler | None,
        clip_grad_norm: float | None,
        log: FailureLog,
    ) -> None:
        self._transaction = transaction
        self._factor = factor
        self._clip_grad_norm = clip_grad_norm
        self._log = log
        self._grads: list[Tensor] = []
        self._left: list[_Action] = []
        if isinstance(factor, Tensor) or factor != 1.0:
            self._left.append(("dividing the gradients", self._divide, True))
        if scaler is not None:
            unscale = functools.partial(scaler.unscale_, self)  # type: ignore[arg-type]
            self._left.append(("unscaling the gradients", unscale, True))
        if clip_grad_norm is not None:
            self._left.append(("clipping the gradients", self._clip, True))
        if self._left:
            params = [p for group in self.param_groups for p in group["params"]]
            self._grads = [local_tensor(p.grad) for p in params if p.grad is not None]
        if scaler is None:
            self._left.append(("the optimizer's step", self.step, False))
        else:
            self._left.append(("the optimizer's step", functools.partial(scaler.step, self), False))  # type: ignore[arg-type]
            self._left.append(("updating the scale", scaler.update, False))
        self.stepped = False
        """Whether the optimizer was stepped: the scaler skips a step whose gradients are infinite."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's, for the scaler."""
        return self._transaction.param_groups

    def run(self) -> None:
        """Do what is left to do.

        Raises:
            PartialGradientsError: the gradients have to be computed again.
            OptimizerStageError: memory ran out too often.
        """
        failures = 0
        while self._left:
            name, run, retries_ops = self._left[0]
            retrying = None
            if retries_ops:
                retrying = RetryOps(set(map(storage_key, self._grads)), self._log)
                run = functools.partial(_run_within, retrying, run)
            failure = attempt(run).failure
            if failure is None:
                failures = 0
                del self._left[0]
                continue
            self._log.record(failure)
            if retrying is not None and retrying.changes:
                raise PartialGradientsError
            failures += 1
            if failures == MAX_TRIES:
                raise OptimizerStageError(name, failure)

    def step(self) -> None:
        """Step the optimizer, for the scaler."""
        self._transaction.step()
        self.stepped = True

    @torch.no_grad()
    def _divide(self) -> None:
        self._multiply(self._factor)

    @torch.no_grad()
    def _clip(self) -> None:
        """Do what `torch.nn.utils.clip_grad_norm_` does: the same sums and the same factor."""
        assert self._clip_grad_norm is not None
        norm = torch.nn.utils.get_total_norm(self._grads)
        self._multiply(torch.clamp(self._clip_grad_norm / (norm + 1e-6), max=1.0))

    def _multiply(self, factor: float | Tensor) -> None:
        by_device: dict[torch.device, list[Tensor]] = {}
        for grad in self._grads:
            by_device.setdefault(grad.device, []).append(grad)
        for device, grads in by_device.items():
            own = factor.to(device) if isinstance(factor, Tensor) else factor
            dense = [grad for grad in grads if grad.layout is torch.strided]
            if dense:
                torch._foreach_mul_(dense, own)
            for grad in grads:
                if grad.layout is not torch.strided:
                    grad.mul_(own)


def _run_within(retrying: RetryOps, body: Callable[[], object]) -> None:
    with retrying:
        body()
