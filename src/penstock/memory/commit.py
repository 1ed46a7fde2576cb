"""The end of a window: gradients are divided, unscaled and clipped, and the optimizer is stepped; each exactly once.

Each stage is tried again where memory ran out in it. The optimizer's step is a transaction of its own. In the stages
before it each operation is insisted on (`insist.py`), for one of several that change gradients cannot be begun again by
all of them together. Gradients that were changed in part nevertheless must be computed again: `TornError`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.distributed.peers import local
from penstock.memory.failure import TRIES, Failure, FailureLog, attempt
from penstock.memory.holdings import storage_key
from penstock.memory.insist import Insisting
from penstock.memory.transaction import StepTransaction


class TornError(Exception):
    """A failure has left some gradients changed and others not."""


class StageError(Exception):
    """A stage has failed again and again."""

    def __init__(self, stage: str, failure: Failure) -> None:
        super().__init__(f"{stage}: {failure.text}")
        self.stage = stage
        self.failure = failure


@dataclass(frozen=True, slots=True)
class _Stage:
    name: str
    body: Callable[[], object]
    is_insisted_on: bool = False


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
        self._grads: list[Tensor] = []
        self._stages: list[_Stage] = []
        if isinstance(factor, Tensor) or factor != 1.0:
            self._stages.append(_Stage("dividing the gradients", self._divide, is_insisted_on=True))
        if scaler is not None:
            unscale = functools.partial(scaler.unscale_, self)  # type: ignore[arg-type]
            self._stages.append(_Stage("unscaling the gradients", unscale, is_insisted_on=True))
        if clip_grad_norm is not None:
            self._stages.append(_Stage("clipping the gradients", self._clip_grads, is_insisted_on=True))
        if scaler is None:
            self._stages.append(_Stage("the optimizer's step", self.step))
        else:
            self._stages.append(_Stage("the optimizer's step", functools.partial(scaler.step, self)))  # type: ignore[arg-type]
            self._stages.append(_Stage("updating the scale", scaler.update))
        if any(stage.is_insisted_on for stage in self._stages):
            self._grads = [local(p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._storages = set(map(storage_key, self._grads))
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
            self._do(self._stages[0])
            self._stages.pop(0)

    def step(self) -> None:
        """Step the optimizer, for the scaler."""
        self._transaction.step()
        self.stepped = True

    def _do(self, stage: _Stage) -> None:
        for tries_left in reversed(range(TRIES)):
            insisting = Insisting(self._storages, self._log) if stage.is_insisted_on else None
            failure = attempt(functools.partial(_run, stage, insisting)).failure
            if failure is None:
                return
            self._log.note(failure)
            if insisting is not None and insisting.changes:
                raise TornError
            if not tries_left:
                raise StageError(stage.name, failure)

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


def _run(stage: _Stage, insisting: Insisting | None) -> None:
    with insisting or contextlib.nullcontext():
        stage.body()
