"""FsdpSync: the ranks of a sharded model (FSDP2), which meet inside its forward and backward.

Every rank cuts a step into the same number of micro-batches, because their collectives must match. Before the step,
ranks vote on that number, each with what its memory has room for. After each micro-batch they vote on whether all have
finished it. A rank that has not takes part in the rest of the micro-batch's collectives with zeros, so that the others
can finish.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.core.errors import RankError
from penstock.distributed.collectives import CollectiveSchedule
from penstock.distributed.rank_group import RankGroup, local_tensor
from penstock.memory.explain import OutOfMemoryError
from penstock.memory.recovery.attempt import attempt, retry
from penstock.memory.recovery.failure import Failure
from penstock.memory.step.ddp_sync import StepTotals, raise_failures


class ShortageError(Exception):
    """Memory ran out on some rank, and the window has to be attempted again on all of them.

    Args:
        failure: what happened, where it happened on this rank.
    """

    def __init__(self, failure: Failure | None) -> None:
        super().__init__("memory ran out on a rank")
        self.failure = failure


class FsdpSync:
    """The ranks of a sharded model. All of them call every method but `compute_norm`, in the same order.

    Args:
        model: with FSDP2 modules.
        ranks: its ranks.
        optimizer: whose gradients are clipped.
        clip_grad_norm: the largest norm of all gradients together, if there is one.
    """

    def __init__(self, model: nn.Module, ranks: RankGroup, optimizer: Optimizer, clip_grad_norm: float | None) -> None:
        self._ranks = ranks
        self._optimizer = optimizer
        self._clip_grad_norm = clip_grad_norm
        self._schedule = CollectiveSchedule(model, self.raise_if_failed)
        self._squared_norm = 0.0
        self._reported: BaseException | None = None
        """The error that the other ranks know of."""

    @property
    def size(self) -> int:
        """How many ranks there are; torch divides gradients by it."""
        return self._ranks.size

    def sum_over_ranks(self, number: float) -> float:
        """Return the sum of a number over all ranks."""
        return self._vote(number=number)[0]

    def agree_on_parts(self, own: int) -> int:
        """Return into how many micro-batches all ranks cut their batch: the most that any rank needs."""
        return -int(self._vote(minimum=-own)[1])

    def run_micro_batch(self, run: Callable[[], object]) -> None:
        """Run forward and backward of a micro-batch.

        Raises:
            ShortageError: memory ran out on some rank; the whole window has to be attempted again.
            RankError: another rank has given up.
        """
        failure = None
        try:
            failure = attempt(functools.partial(self._run_scheduled, run)).failure
        except ShortageError:
            raise
        except Exception as error:
            if not isinstance(error, RankError):
                self._complete_with_zeros()
                self.report_failure(error)
            raise
        if failure is not None:
            self._complete_with_zeros()
        self._vote(failure=failure)

    def can_reset(self) -> bool:
        """Return whether the model can be used again after an interrupted micro-batch (torch 2.13 and later)."""
        return self._schedule.can_reset()

    def reset(self) -> None:
        """Put the model into the state between two micro-batches."""
        self._schedule.reset()

    def raise_if_failed(self) -> None:
        """Vote, with nothing to report.

        Raises:
            RankError: some rank has given up, with its error.
        """
        self._vote()

    def compute_norm(self) -> None:
        """Compute the squared norm of this rank's part of all gradients, if they are clipped. May be called again."""
        if self._clip_grad_norm is None:
            return
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        grads = [local_tensor(p.grad) for p in params if p.grad is not None]
        self._squared_norm = sum(float(grad.to(torch.float64).square().sum()) for grad in grads)

    def vote_on_totals(self, weight: float, micro_batch: float, estimated_weight: float) -> StepTotals:
        """Vote, when gradients are complete, on what to multiply them by. torch has added them up in backward.

        Args:
            weight: of this rank's window.
            micro_batch: the most samples that this rank has room for at once.
            estimated_weight: what losses have been divided by.
        """
        total, least, squares = self._vote(minimum=micro_batch, number=weight, more=self._squared_norm)
        factor = estimated_weight / total if total else 0.0
        if self._clip_grad_norm is not None:
            ratio = self._clip_grad_norm / (factor * math.sqrt(squares) + 1e-6)
            factor *= ratio if not ratio >= 1 else 1.0  # NaN stays NaN, as in torch's clip_grad_norm_
        return StepTotals(total, least, factor)

    def report_failure(self, error: Exception) -> None:
        """Let the other ranks know, in their next vote, that this one has given up."""
        if error is self._reported:
            return
        self._reported = error
        self._ranks.vote(failed=True, minimum=math.inf, addends=[1.0, 0.0, 0.0])
        self._ranks.gather_texts(f"{type(error).__name__}: {error}")

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Do nothing: each rank of a sharded model has its own buffers."""

    def _run_scheduled(self, run: Callable[[], object]) -> None:
        with self._schedule.micro_batch():
            run()

    def _complete_with_zeros(self) -> None:
        """Take part in the collectives that are left, if they are known; else the others wait in their next vote."""
        if self._schedule.is_known and (failure := retry(self._schedule.complete_with_zeros).failure) is not None:
            raise OutOfMemoryError(failure.text)

    def _vote(
        self, *, failure: Failure | None = None, minimum: float = math.inf, number: float = 0.0, more: float = 0.0
    ) -> tuple[float, float, float]:
        """Vote. All votes have the same form, so that a rank that has given up can meet the others in any of them."""
        vote = self._ranks.vote(failed=failure is not None, minimum=minimum, addends=[0.0, number, more])
        given_up, number, more = vote.sums
        if given_up:
            raise_failures(self._ranks.gather_texts(""))
        if vote.failed:
            raise ShortageError(failure)
        return number, vote.minimum, more
