"""The ranks that take a step together: those of DistributedDataParallel, and of a sharded model (FSDP2).

**DdpSync**: no collective runs where memory can run out: forward and backward of a rank are its own, and it may try
them as often as it takes while the others wait. Then there is one vote, and if no rank has given up, gradients are
added up.

**FsdpSync**: ranks meet inside forward and backward. Every rank cuts a step into the same number of micro-batches,
because their collectives must match. Before the step, ranks vote on that number, each with what its memory has room
for. After each micro-batch they vote on whether all have finished it. A rank that has not takes part in the rest of the
micro-batch's collectives with zeros, so that the others can finish.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.core.errors import RankError
from penstock.distributed.collectives import CollectiveSchedule
from penstock.distributed.rank_group import RankGroup, local_tensor
from penstock.memory.recovery.out_of_memory import Failure, OutOfMemoryError, attempt, retry


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What all ranks know when all have their gradients."""

    weight: float
    """The weight of the window, over all ranks."""

    micro_batch: float
    """The most samples that every rank has room for at once; infinite while no rank has met a limit."""

    factor: float | None = None
    """What to multiply gradients by, clipping included; None where each rank finds out by itself."""


class DdpSync:
    """The ranks that take a step together. All of them call every method, in the same order.

    Args:
        ranks: the model's ranks.
        optimizer: whose parameters' gradients are added up.
    """

    def __init__(self, ranks: RankGroup, optimizer: Optimizer) -> None:
        self._ranks = ranks
        self._optimizer = optimizer

    def sum_over_ranks(self, number: float) -> float:
        """Return the sum of a number over all ranks."""
        return self._ranks.vote(failed=False, minimum=0, addends=[number]).sums[0]

    def vote_and_reduce(self, weight: float, micro_batch: float) -> StepTotals:
        """Vote, then add up the gradients of all ranks. A parameter that some ranks did not use counts as zero there.

        Raises:
            RankError: some rank has given up.
        """
        params = self._params()
        used = [param.grad is not None for param in params]
        vote = self._ranks.vote(failed=False, minimum=micro_batch, addends=[weight, *used])
        if vote.failed:
            self._raise_failures("")
        total, *counts = vote.sums
        if any(0 < count < self._ranks.size for count in counts):
            lacking = [p for p, count in zip(params, counts, strict=True) if count and p.grad is None]
            failure = retry(functools.partial(_make_zero_gradients, lacking)).failure
            if self._ranks.vote(failed=failure is not None, minimum=0, addends=()).failed:
                self._raise_failures("" if failure is None else failure.text)
        self._ranks.all_reduce_sum([param.grad for param in params if param.grad is not None])
        return StepTotals(total, vote.minimum)

    def report_failure(self, error: Exception) -> None:
        """Let the other ranks know, in their next vote, that this one has given up."""
        self._ranks.vote(failed=True, minimum=math.inf, addends=[0.0] * (1 + len(self._params())))
        self._ranks.gather_texts(f"{type(error).__name__}: {error}")

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give every rank the first one's buffers, if the model asks for that."""
        if self._ranks.broadcasts_buffers:
            self._ranks.broadcast_from_first(model.buffers())

    def _raise_failures(self, own: str) -> None:
        raise_failures(self._ranks.gather_texts(own))

    def _params(self) -> list[Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]


def raise_failures(texts: list[str]) -> None:
    """Raise RankError for a step that was given up, with what each rank reports (empty where it did not fail)."""
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    raise RankError(f"this step was given up on all ranks, because it failed on {'; '.join(failures)}")


def _make_zero_gradients(params: list[Tensor]) -> None:
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)


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
