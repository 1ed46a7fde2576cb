"""What a step has to settle with the other ranks of its model. Ranks meet when each has its gradients, or has given up.

No collective runs where memory can run out: forward and backward of a rank are its own, and it may try them as often as
it takes while the others wait. Then there is one vote, and if nobody has given up, gradients are added up.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.core.errors import RankError
from penstock.distributed.peers import Peers
from penstock.memory.failure import insist


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know when all have their gradients."""

    weight: float
    """The weight of the window, over all ranks."""

    micro_batch: float
    """The most samples that every rank has room for at once; infinite while no rank has met a limit."""

    factor: float | None = None
    """What to multiply gradients by, clipping included; None where that is each rank's own business."""


class Together:
    """The ranks that take a step together; every method is called by all of them, in the same order.

    Args:
        peers: the ranks.
        optimizer: whose parameters' gradients are added up.
    """

    def __init__(self, peers: Peers, optimizer: Optimizer) -> None:
        self._peers = peers
        self._optimizer = optimizer

    def total(self, number: float) -> float:
        """Return the sum of a number over all ranks."""
        return self._peers.vote(failed=False, least=0, numbers=[number]).sums[0]

    def agree(self, weight: float, micro_batch: float) -> Agreement:
        """Vote, then add up the gradients of all ranks. A parameter that some ranks did not use counts as zero there.

        Raises:
            RankError: some rank has given up.
        """
        params = self._params()
        used = [param.grad is not None for param in params]
        vote = self._peers.vote(failed=False, least=micro_batch, numbers=[weight, *used])
        if vote.failed:
            self._leave("")
        total, *counts = vote.sums
        if any(0 < count < self._peers.size for count in counts):
            lacking = [p for p, count in zip(params, counts, strict=True) if count and p.grad is None]
            failure = insist(functools.partial(_make_zero_gradients, lacking))
            if self._peers.vote(failed=failure is not None, least=0, numbers=()).failed:
                self._leave("" if failure is None else failure.text)
        self._peers.add_up([param.grad for param in params if param.grad is not None])
        return Agreement(total, vote.least)

    def fail(self, error: Exception) -> None:
        """Tell the other ranks, where they vote next, that this one has given up."""
        self._peers.vote(failed=True, least=math.inf, numbers=[0.0] * (1 + len(self._params())))
        self._peers.exchange(f"{type(error).__name__}: {error}")

    def share_buffers(self, model: nn.Module) -> None:
        """Let every rank have the first one's buffers, if the model is to."""
        if self._peers.broadcast_buffers:
            self._peers.take_over(model.buffers())

    def _leave(self, own: str) -> None:
        texts = self._peers.exchange(own)
        said = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        raise RankError(f"this step was given up on all ranks, because it failed on {'; '.join(said)}")

    def _params(self) -> list[Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]


def _make_zero_gradients(params: list[Tensor]) -> None:
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
