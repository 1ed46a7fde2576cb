"""The end of a window: gradients are divided, unscaled and clipped, and the optimizer is stepped; each exactly once.

Each stage is tried again where memory ran out in it. That is safe as long as it had changed nothing, which the
version counters of the gradients tell (they count in-place changes); the optimizer's step is a transaction of its own.
Gradients that were changed in part must be computed again: `TornError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.distributed.peers import local
from penstock.memory.failure import TRIES, Failure, FailureLog, attempt
from penstock.memory.transaction import StepTransaction


class TornError(Exception):
    """A failure has left some gradients changed and others not."""


class StageError(Exception):
    """A stage has failed again and again."""

    def __init__(self, stage: str, failure: Failure) -> None:
        super().__init__(f"{stage}: {failure.text}")
        self.stage = stage
        self.failure = failure


class Commit:
    """One optimizer step on gradients that are complete. `run` may be called again after it has raised StageError.

    For the GradScaler it is the optimizer: what it remembers of an optimizer, it remembers of this object, so that it
    has nothing on record when gradients that were torn are computed again.

    Args:
        transaction: steps the optimizer.
        factor: what to multiply gradients by: a number, or a tensor on an accelerator.
        scaler: what scaled the losses, if anything did.
        clip_grad_norm: the largest total norm, if there is one.
        log: takes note of every failure survived.
    """

    def __init__(
        self,
        transaction: StepTransaction,
        *,
        factor: float | Tensor,
        scaler: torch.amp.GradScaler | None,
        clip_grad_norm: float | None,
        log: FailureLog,
    ) -> None:
        self._transaction = transaction
        self._factor = factor
        self._scaler = scaler
        self._clip = clip_grad_norm
        self._log = log
        self._grads = [local(p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._stages: list[tuple[str, Callable[[], None]]] = []
        if isinstance(factor, Tensor) or factor != 1.0:
            self._stages.append(("dividing the gradients", self._divide))
        if scaler is not None:
            self._stages.append(("unscaling the gradients", lambda: scaler.unscale_(self)))  # type: ignore[arg-type]
        if clip_grad_norm is not None:
            self._stages.append(("clipping the gradients", self._clip_grads))
        if scaler is None:
            self._stages.append(("the optimizer's step", self.step))
        else:
            self._stages.append(("the optimizer's step", lambda: scaler.step(self)))  # type: ignore[arg-type]
            self._stages.append(("updating the scale", scaler.update))
        self.stepped = False
        """Whether the optimizer was stepped: the scaler leaves it out when gradients are infinite."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's, for the scaler."""
        return self._transaction.param_groups

    def run(self) -> None:
        """Do what is left to do.

        Raises:
            TornError: the gradients have to be computed again.
            StageError: memory ran out too often.
        """
        while self._stages:
            self._do(*self._stages[0])
            self._stages.pop(0)

    def step(self) -> None:
        """Step the optimizer, for the scaler."""
        self._transaction.step()
        self.stepped = True

    def _do(self, name: str, stage: Callable[[], None]) -> None:
        versions = [grad._version for grad in self._grads]
        for tries_left in reversed(range(TRIES)):
            failure = attempt(stage).failure
            if failure is None:
                return
            self._log.note(failure)
            if not self._transaction.is_underway and versions != [grad._version for grad in self._grads]:
                raise TornError
            if not tries_left:
                raise StageError(name, failure)

    @torch.no_grad()
    def _divide(self) -> None:
        self._multiply(self._factor)

    @torch.no_grad()
    def _clip_grads(self) -> None:
        """Do what `torch.nn.utils.clip_grad_norm_` does: the same sums and the same factor."""
        assert self._clip is not None
        norm = torch.nn.utils.get_total_norm(self._grads)
        self._multiply(torch.clamp(self._clip / (norm + 1e-6), max=1.0))

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
