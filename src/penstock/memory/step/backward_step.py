"""BackwardStep: forward and backward of a batch inside a framework's loop, which steps the optimizer itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.core.errors import OptionError
from penstock.memory.microbatch.cutting import CuttingOptions
from penstock.memory.step.guarded_backward import GuardedBackward, Scale, sum_of_losses
from penstock.memory.step.guarded_optimizer import guard_optimizer
from penstock.memory.step.loss_weights import Weight


class BackwardStep:
    """Adds the gradients of a batch's loss, as `backward(loss_fn(model, batch))` does, also where memory runs out.

    A batch that runs out of memory is run once more, and then in parts, whose losses are weighted so that they add up:
    gradients are those of the whole batch, and those of earlier batches stay. The first cut is checked (see `weight`).
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
        allow_batch_dependent: layers that may see smaller parts although their result depends on them. Cuts are not
            checked then.

    Raises:
        OptionError: the model is parallel, or an option is out of range.

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
        self._guarded = GuardedBackward(model, optimizer, weight=weight, backward=backward, **cutting)
        if optimizer is not None:
            guard_optimizer(optimizer, model)

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
