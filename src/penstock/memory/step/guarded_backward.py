"""GuardedBackward: forward and backward of a batch by someone else's function, until it fits.

A framework's step is a black box that computes a loss and calls backward. Whoever adapts it lets the loss of each part
pass through `scale` on its way to backward: there it is multiplied by the part's share of the batch, and there it is
seen when the parts' shares have to be found out (`loss_weights.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.core.errors import OptionError
from penstock.memory.explain import OutOfMemoryError
from penstock.memory.microbatch.cutting import Cutting, CuttingOptions
from penstock.memory.step.forward_guard import Attempt
from penstock.memory.step.loss_weights import CutRefusedError, LossWeights, Weight
from penstock.memory.step.oom_guard import OOMGuard

Scale = Callable[[Tensor], Tensor]
ForwardBackward = Callable[[Any, Scale], Any]
"""`(part, scale)`: compute the loss of `part`, and call backward with `scale(loss)`."""


class GuardedBackward:
    """Runs batches by `ForwardBackward` functions; the arguments are those of `BackwardStep`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        weight: Weight | Literal["sum"] | None = None,
        backward: Callable[[Tensor], object] = Tensor.backward,
        **cutting: Unpack[CuttingOptions],
    ) -> None:
        self._guard = OOMGuard(model, optimizer, **cutting)
        how = Cutting.of("BackwardStep", cutting)
        self.count_samples = how.count
        self._weights = LossWeights(model, optimizer, weight, backward, how)

    @property
    def largest_fitting(self) -> int | None:
        """The most samples at once that are believed to fit, of the largest ones; None while nothing has failed."""
        return self._guard.largest_fitting

    def run(
        self, batch: Any, forward_backward: ForwardBackward, before_attempt: Callable[[], object] = lambda: None
    ) -> list[tuple[Any, Any, float]]:
        """Add the gradients of a batch.

        Args:
            batch: as `forward_backward` takes it.
            forward_backward: called for the batch, or for each of its parts, in order.
            before_attempt: puts back what the one who calls knows of.

        Returns:
            For each part that was run: the part, what `forward_backward` returned, and the part's share of the loss.

        Raises:
            OutOfMemoryError: a single sample does not fit, or the batch must not be cut.
        """
        found: list[tuple[Any, Any, float]] = []
        try:
            for attempt in self._guard.attempts(batch):
                found = self._run(batch, attempt, forward_backward, before_attempt)
        except CutRefusedError as error:
            raise OutOfMemoryError(f"a batch does not fit and was not cut: {error}") from None
        return found

    def _run(
        self, batch: Any, attempt: Attempt, forward_backward: ForwardBackward, before_attempt: Callable[[], object]
    ) -> list[tuple[Any, Any, float]]:
        # What a failed attempt made is only in this frame, which ends with it.
        with attempt:
            shares = self._weights.shares(batch, attempt.parts, lambda part: _see_loss(forward_backward, part))
            before_attempt()
            run = [(part, share) for part, share in zip(attempt.parts, shares, strict=True) if share]
            return [(part, forward_backward(part, _multiply_by(share)), share) for part, share in run]
        return []


def sum_of_losses(losses: Sequence[tuple[Tensor, float]]) -> Tensor:
    """Return the loss of a batch from those of its parts and their shares; of a single part as it is."""
    with torch.no_grad():
        scaled = [loss if share == 1 else loss * share for loss, share in losses]
        return scaled[0] if len(scaled) == 1 else torch.stack(scaled).sum(0)


class _LossSeenError(Exception):
    def __init__(self, loss: Tensor) -> None:
        super().__init__("the loss was seen")
        self.loss = loss


def _see_loss(forward_backward: ForwardBackward, part: Any) -> Tensor:
    """Return the loss of a part, before its backward."""

    def see(loss: Tensor) -> Tensor:
        raise _LossSeenError(loss)

    try:
        forward_backward(part, see)
    except _LossSeenError as seen:
        return seen.loss
    raise OptionError("the step has not called backward, so how the losses of parts add up cannot be found out")


def _multiply_by(share: float) -> Scale:
    return lambda loss: loss if share == 1 else loss * share
