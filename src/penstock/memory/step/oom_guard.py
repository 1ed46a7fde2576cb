"""OOMGuard: recovery from out-of-memory inside a training loop that the user wrote."""

from __future__ import annotations

from typing import Unpack

from torch import nn
from torch.optim import Optimizer

from penstock.distributed.rank_group import reject_parallel
from penstock.memory.explain import explain_failure
from penstock.memory.microbatch.cutting import Cutting, CuttingOptions
from penstock.memory.recovery.failure import Failure
from penstock.memory.recovery.joined_optimizers import reject_gradient_hooks
from penstock.memory.recovery.saved_gradients import SavedGradients
from penstock.memory.step.forward_guard import ForwardGuard


class OOMGuard(ForwardGuard):
    """Tries forward and backward of a batch until they fit: the whole batch, the same again, then smaller parts.

    Before each further try random states, buffers and gradients are as they were before the first. Gradients of earlier
    batches, where you accumulate them, are copied for that; otherwise call `optimizer.zero_grad()` before each batch.
    What a try made and your own function still refers to (`outputs`, `loss`) is not freed by a failure; put the body
    of the loop into a function.

    Args:
        model: whose buffers are restored.
        optimizer: whose parameters' gradients are meant, if some of them are not the model's.
        micro_batch: the most samples at once to begin with; None for the whole batch.
        split: `(batch, parts) -> batches`.
        batch_size: `batch -> samples`.
        batch_dims: which dimension of a batch's tensors has the samples; as for `TrainStep`.
        also: what else to put back before a further try: modules, generators, and objects with `state_dict` and
            `load_state_dict`; as for `TrainStep`. Attributes of the model are found without being said.
        allow_batch_dependent: layers that may see smaller micro-batches although their result depends on them; as for
            `TrainStep`.

    Raises:
        OptionError: micro_batch is out of range, the model is parallel, or something is stepped in backward.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> guard = OOMGuard(model)
        >>> import torch
        >>> batch = torch.ones(4, 3)
        >>> for attempt in guard.attempts(batch):
        ...     with attempt:
        ...         for part in attempt.parts:
        ...             (model(part).sum() / len(batch)).backward()
        >>> model.bias.grad.item()
        1.0
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None, **cutting: Unpack[CuttingOptions]) -> None:
        reject_parallel(model)
        super().__init__(model, Cutting.of("OOMGuard", cutting))
        self._optimizer = optimizer
        reject_gradient_hooks(list(model.parameters()))
        self._gradients = SavedGradients(self._modules, optimizer, with_stepped=True)

    def _save(self) -> None:
        self._retry(self._gradients.save)

    def _restore(self) -> None:
        self._retry(self._gradients.restore)

    def _discard(self) -> None:
        self._gradients.discard()

    def _explain(self, failure: Failure) -> str:
        return explain_failure(failure, self._model, self._optimizer)
