"""BackwardStep: forward and backward of a batch inside a framework's loop, which steps the optimizer itself.

A framework's step is a black box that computes a loss and calls backward. Whoever adapts it (`GuardedBackward`) lets
the loss of each part pass through `scale` on its way to backward: there it is multiplied by the part's share of the
batch, and there it is seen when the parts' shares have to be found out (`loss_weights.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.core.errors import OptionError
from penstock.distributed.rank_group import reject_parallel
from penstock.memory.attempts import BatchAttempts
from penstock.memory.cutting.loss_weights import LossWeights, Weight
from penstock.memory.cutting.micro_batch import Cutting, CuttingOptions
from penstock.memory.guarded_optimizer import guard_optimizer
from penstock.memory.optimizer.joined_optimizers import reject_gradient_hooks
from penstock.memory.recovery.out_of_memory import FailureLog
from penstock.memory.recovery.snapshot import Snapshot

Scale = Callable[[Tensor], Tensor]
ForwardBackward = Callable[[Any, Scale], Any]
"""`(part, scale)`: compute the loss of `part`, and call backward with `scale(loss)`."""


class GuardedBackward:
    """Runs batches by `ForwardBackward` functions; the arguments are those of `BackwardStep`, and a log of failures."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        weight: Weight | Literal["sum"] | None = None,
        backward: Callable[[Tensor], object] = Tensor.backward,
        loss_fn: Callable[..., Any] | None = None,
        log: FailureLog | None = None,
        **cutting: Unpack[CuttingOptions],
    ) -> None:
        reject_parallel(model)
        reject_gradient_hooks(list(model.parameters()))
        how = Cutting.of("BackwardStep", cutting)
        self.count_samples = how.size_of
        # an optimizer's step inside of an attempt must not pass for a change that can be put back
        snapshot = Snapshot(model, optimizer, how.also, loss_fn, copies_params=False)
        self._weights = LossWeights(model, optimizer, weight, backward, how)
        self._attempts = BatchAttempts(model, optimizer, how, self._weights, snapshot, log or FailureLog())

    @property
    def largest_fitting(self) -> int | None:
        """The most samples at once that are believed to fit, of the largest ones; None while nothing has failed."""
        return self._attempts.largest_fitting

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

        def see_loss(part: Any) -> Tensor:
            before_attempt()
            return _see_loss(forward_backward, part)

        def run(parts: Sequence[Any]) -> list[tuple[Any, Any, float]]:
            shares = self._weights.shares(batch, parts)
            before_attempt()
            weighed = [(part, share) for part, share in zip(parts, shares, strict=True) if share]
            return [(part, forward_backward(part, _multiply_by(share)), share) for part, share in weighed]

        with self._weights.seeing(see_loss):
            return self._attempts.run(batch, run) or []


class BackwardStep:
    """Adds the gradients of a batch's loss, as `backward(loss_fn(model, batch))` does, also where memory runs out.

    A batch that runs out of memory is run once more, and then in parts, whose losses are weighted so that they add up:
    gradients are those of the whole batch, and those of earlier batches stay. The first cut is compared (see `weight`).
    The loop keeps all else: accumulation, clipping, the optimizer, the scheduler.

    Args:
        model: in one process, on its device, as the framework has prepared it.
        loss_fn: `(model, batch) -> loss`: a tensor, or an output that has one as `loss` (attribute or key).
        optimizer: whose step survives too, from now on. Without it, a failure in the step reaches the loop.
        backward: `accelerator.backward`, `fabric.backward`, or what else takes the loss; by default `Tensor.backward`.
        weight: what the loss of a batch is a mean of, as in `lambda batch: (batch["labels"] != -100).sum()`, or "sum"
            where it is a sum, or one divided by something that is not the batch's own (all tokens of several batches).
            By default that is found out with the first batch that has to be cut: a part of it is run whole and cut,
            and what gives the same gradients is taken. If nothing does, the batch is not cut.
        micro_batch: the most samples at once to begin with; None for the whole batch.
        split: `(batch, parts) -> batches`.
        batch_size: `batch -> samples`.
        batch_dims: which dimension of a batch's tensors has the samples; as for `TrainStep`.
        also: what else to put back after a failure; as for `TrainStep`.
        allow_batch_dependent: layers that may see smaller parts although their result depends on them, or True for all
            that couples samples. Cuts are not compared then.

    Raises:
        OptionError: the model is parallel, something is stepped in backward, or an option is out of range.

    Example:
        >>> import torch
        >>> model = nn.Linear(3, 1)
        >>> step = BackwardStep(model, lambda model, batch: model(batch).square().mean(), micro_batch=2)
        >>> loss = step(torch.ones(4, 3))
        >>> loss.requires_grad, model.weight.grad is not None
        (False, True)
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        *,
        optimizer: Optimizer | None = None,
        backward: Callable[[Tensor], object] = Tensor.backward,
        weight: Weight | Literal["sum"] | None = None,
        **cutting: Unpack[CuttingOptions],
    ) -> None:
        self._model, self._loss_fn, self._backward = model, loss_fn, backward
        log = FailureLog()
        self._guarded = GuardedBackward(
            model, optimizer, weight=weight, backward=backward, loss_fn=loss_fn, log=log, **cutting
        )
        if optimizer is not None:
            guard_optimizer(optimizer, model, log)

    def __call__(self, batch: Any, **arguments: Any) -> Tensor:
        """Add the gradients of a batch; `arguments` go to `loss_fn`, as in `num_items_in_batch=tokens`.

        Returns:
            The batch's loss, detached.

        Raises:
            OutOfMemoryError: a single sample does not fit, or the batch must not be cut.
            OptionError: `loss_fn` returned something else than a loss.
        """

        def run(part: Any, scale: Scale) -> Tensor:
            loss = loss_in(self._loss_fn(self._model, part, **arguments))
            self._backward(scale(loss))
            return loss.detach()

        return sum_of_losses([(loss, share) for _, loss, share in self._guarded.run(batch, run)])

    @property
    def largest_fitting(self) -> int | None:
        """The most samples at once that are believed to fit, of the largest ones; None while nothing has failed."""
        return self._guarded.largest_fitting


def loss_in(output: Any) -> Tensor:
    """Return the loss that a loss function returned, or that its output has.

    Raises:
        OptionError: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(loss, Tensor):
        raise OptionError(f"loss_fn must return a tensor, or an output with a loss, not a {type(output).__name__}")
    return loss


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
