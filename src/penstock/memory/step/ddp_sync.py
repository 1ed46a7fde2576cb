"""DdpSync: the ranks of a DistributedDataParallel model vote and reduce after backward.

No collective runs where memory can run out: forward and backward of a rank are its own, and it may try them as often as
it takes while the others wait. Then there is one vote, and if no rank has given up, gradients are added up.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.core.errors import RankError
from penstock.distributed.rank_group import RankGroup
from penstock.memory.recovery.attempt import retry


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
