"""EvalStep: a model's outputs for a batch, also where memory is too short for all of it at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import nn

from penstock.core.tree import call_with
from penstock.distributed.rank_group import reject_ranks
from penstock.memory.attempts import BatchAttempts
from penstock.memory.cutting.cut_check import output_comparison
from penstock.memory.cutting.join import join_outputs
from penstock.memory.cutting.micro_batch import Cutting, CuttingOptions
from penstock.memory.recovery.out_of_memory import FailureLog
from penstock.memory.recovery.snapshot import Snapshot


class EvalStep:
    """Computes outputs without gradients; when memory runs out, again with smaller parts of the batch.

    Evaluation and generation often need more memory than a step of training: batches are larger, sequences longer. A
    batch is tried whole, once more (memory may have been short for a moment), and then in halves, quarters, ... Their
    outputs are joined. What fitted is remembered for the next batches.

    The model is used as it is: call `model.eval()` first. A batch is not cut where that would change the result (a
    softmax over the batch, BatchNorm in training mode): outputs of a part that fits are compared before the first cut.
    Draws differ between a whole batch and a cut one (dropout, sampling in `generate`): both are as random.

    Args:
        model: whose buffers and random states are put back before another try.
        forward: called as `forward(model, batch)`; by default `model(batch)` for a tensor, `model(*batch)` for a tuple
            or list, `model(**batch)` for a dict. For generation:
            `lambda model, batch: model.generate(**batch, max_length=128)`.
        join: `(outputs of the parts, samples of each) -> output`; by default tensors with a row for each sample are
            joined by rows, lists with an item for each one after another, inside of dicts, tuples and dataclasses.
        micro_batch: the most samples at once to begin with; None for the whole batch.
        split: `(batch, parts) -> batches`; by default along the first dimension.
        batch_size: `batch -> samples`.
        batch_dims: which dimension of a batch's tensors has the samples; as for `TrainStep`.
        also: what else to put back; as for `TrainStep`.
        allow_batch_dependent: layers that may see smaller parts although their result depends on them.

    Raises:
        OptionError: micro_batch is out of range, an option contradicts another, or the model's ranks communicate.

    Example:
        >>> model = nn.Linear(3, 2).eval()
        >>> step = EvalStep(model, micro_batch=4)
        >>> step(torch.ones(10, 3)).shape, step.largest_fitting
        (torch.Size([10, 2]), None)
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Any, Any], Any] | None = None,
        *,
        join: Callable[[Sequence[Any], Sequence[int]], Any] | None = None,
        **cutting: Unpack[CuttingOptions],
    ) -> None:
        self.model = model
        self._forward = forward or call_with
        self._join = join or join_outputs
        reject_ranks(
            model, "pass the module of a DistributedDataParallel, and evaluate a sharded model without EvalStep"
        )
        self._cutting = how = Cutting.of("EvalStep", cutting)

        warned: set[str] = set()

        def snapshot() -> Snapshot:
            return Snapshot(model, None, how.also, self._forward, with_stepped=None, copies_params=False, warned=warned)

        comparison = output_comparison(how, snapshot(), functools.partial(self._forward, model), self._join)
        self._attempts = BatchAttempts(model, None, how, comparison, snapshot(), FailureLog())

    def __call__(self, batch: Any) -> Any:
        """Return the model's output for a batch.

        Raises:
            OutOfMemoryError: a single sample does not fit, or the batch must not be cut.
            OptionError: outputs of parts cannot be joined.
        """
        with torch.no_grad():
            return self._attempts.run(batch, self._run)

    @property
    def largest_fitting(self) -> int | None:
        """The most samples at once that are believed to fit, of the largest ones; None while memory has not run out."""
        return self._attempts.largest_fitting

    def _run(self, parts: Sequence[Any]) -> Any:
        outputs = [self._forward(self.model, part) for part in parts]
        return self._join(outputs, [self._cutting.count(part) for part in parts]) if outputs[1:] else outputs[0]
