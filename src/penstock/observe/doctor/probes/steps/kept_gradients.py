"""Gradients that stay from step to step: nothing clears them, and each step adds its own to those of all before."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from penstock.core.user_code import line_text
from penstock.observe.doctor.probes.steps.parameter_use import numbers_of
from penstock.observe.doctor.step_results import StepCall

_Line = tuple[str, int]

_WATCHED = 16
"""Parameters."""


@dataclass(slots=True)
class _Watched:
    """A parameter that got gradients."""

    left: bytes | None = None
    """Its gradients when the step before ended; None once others were added to them."""

    used: bytes | None = None
    """Its gradients when an optimizer began to update it in this step; None if none did."""

    is_kept: bool = False
    """Whether nothing has cleared or replaced its gradients since the step before."""

    line: _Line | None = None
    """What has computed gradients for it in this step."""


class KeptGradients:
    """Watches the gradients of some parameters in the observed steps.

    A step counts if its first gradients were added to exactly those that the step before had left, if no gradients were
    cleared in it, and if it leaves exactly those with which an optimizer has updated the parameter. Gradients that are
    accumulated over batches, those of a model that others are trained through or that is an average of another, and
    those that are scaled down instead of cleared, do not.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Watched] = {}
        self._before: dict[int, bytes] = {}
        self._found: dict[_Line, set[int]] = {}

    def before(self, weights: Iterable[torch.Tensor]) -> None:
        """Note the gradients of parameters before others are computed."""
        for weight in itertools.islice(weights, _WATCHED):
            self._before[id(weight)] = numbers_of(weight.grad)
            known = self._known.get(id(weight))
            if known is not None:
                is_same = known.left is None or known.left == self._before[id(weight)]
                known.is_kept &= is_same and _has_gradient(weight)
                known.left = None

    def after(self, weights: Iterable[torch.Tensor], line: _Line | None) -> None:
        """Note which parameters have got gradients."""
        for weight in itertools.islice(weights, _WATCHED):
            if self._before.get(id(weight)) != numbers_of(weight.grad):
                known = self._known.setdefault(id(weight), _Watched())
                known.line = known.line or line

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note with which gradients an optimizer is about to update parameters."""
        for weight in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
            if id(weight) in self._known:
                self._known[id(weight)].used = numbers_of(weight.grad)

    def end_step(self, step: int, weights: Iterable[torch.Tensor]) -> None:
        """Note which parameters were updated with gradients of other steps, too."""
        for weight in itertools.islice(weights, _WATCHED):
            known = self._known.get(id(weight))
            if known is None:
                continue
            left = numbers_of(weight.grad)
            if known.is_kept and known.line is not None and known.used == left and _has_gradient(weight):
                self._found.setdefault(known.line, set()).add(step)
            self._known[id(weight)] = _Watched(left=left, is_kept=True)

    def lines(self, steps: int) -> tuple[StepCall, ...]:
        """Return the lines that add to such gradients in all steps but the first, of which there were `steps`."""
        return tuple(
            StepCall(what="", line=line_text(*line), per_step=1)
            for line, found in self._found.items()
            if len(found) >= max(2, steps - 1)
        )


def _has_gradient(weight: torch.Tensor) -> bool:
    return weight.grad is not None and bool(weight.grad.any())
