"""Ranks that each hold a shard of the model (FSDP2), and meet inside of its forward and backward.

A step is cut into as many micro-batches on every rank, because their collectives must match: before it, ranks vote on
how many, each with what its memory has room for. After each micro-batch they vote on whether all have got through.
A rank that has not stands in for its part of the micro-batch's collectives, so that the others get there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.core.errors import RankError
from penstock.distributed.peers import Peers, local
from penstock.distributed.schedule import Schedule
from penstock.memory.explain import OutOfMemoryError
from penstock.memory.failure import Failure, attempt, insist
from penstock.memory.together import Agreement


class ShortageError(Exception):
    """A micro-batch has to be begun again on all ranks.

    Args:
        failure: what happened, where it happened on this rank.
    """

    def __init__(self, failure: Failure | None) -> None:
        super().__init__("memory ran out on a rank")
        self.failure = failure


class Shards:
    """The ranks of a sharded model. Every method but `total`'s is called by all of them, in the same order.

    Args:
        model: with FSDP2 modules.
        peers: its ranks.
        optimizer: whose gradients are clipped.
        clip: the largest norm of all gradients together, if there is one.
    """

    def __init__(self, model: nn.Module, peers: Peers, optimizer: Optimizer, clip: float | None) -> None:
        self._peers = peers
        self._optimizer = optimizer
        self._clip = clip
        self._schedule = Schedule(model, self._ask)
        self._squares = 0.0
        self._told: BaseException | None = None
        """The error that the other ranks have been told of."""

    @property
    def size(self) -> int:
        """How many ranks there are; torch divides gradients by it."""
        return self._peers.size

    def total(self, number: float) -> float:
        """Return the sum of a number over all ranks."""
        return self._vote(number=number)[0]

    def parts(self, own: int) -> int:
        """Return into how many micro-batches all ranks cut their batch, when this one wants so many."""
        return -int(self._vote(least=-own)[1])

    def micro_batch(self, run: Callable[[], object]) -> None:
        """Run forward and backward of a micro-batch.

        Raises:
            ShortageError: memory ran out on some rank; the whole window is to be begun again.
            RankError: another rank has given up.
        """
        failure = None
        try:
            failure = attempt(functools.partial(self._within, run)).failure
        except ShortageError:
            raise
        except Exception as error:
            if not isinstance(error, RankError):
                self._stand_in()
                self.fail(error)
            raise
        if failure is not None:
            self._stand_in()
        self._vote(failure=failure)

    def can_reset(self) -> bool:
        """Return whether the model can be gone on with after a micro-batch that broke off (torch 2.13 and later)."""
        return self._schedule.can_reset()

    def reset(self) -> None:
        """Let the model be as before its micro-batches."""
        self._schedule.reset()

    def hear(self) -> None:
        """Hear from the ranks that have given up.

        Raises:
            RankError: with what they said.
        """
        self._vote()

    def measure(self) -> None:
        """Sum up the squares of this rank's part of all gradients, for their norm. May be called again."""
        if self._clip is None:
            return
        grads = [local(p.grad) for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._squares = sum(float(grad.to(torch.float64).square().sum()) for grad in grads)

    def agree(self, weight: float, micro_batch: float, guess: float) -> Agreement:
        """Vote, when gradients are complete, on what they are to be multiplied by.

        Args:
            weight: of this rank's window.
            micro_batch: the most samples that this rank has room for at once.
            guess: what losses have been divided by.
        """
        total, least, squares = self._vote(least=micro_batch, number=weight, more=self._squares)
        factor = guess / total if total else 0.0
        if self._clip is not None:
            ratio = self._clip / (factor * math.sqrt(squares) + 1e-6)
            factor *= ratio if not ratio >= 1 else 1.0  # what is not a number stays so, as in torch's clip_grad_norm_
        return Agreement(total, least, factor)

    def fail(self, error: Exception) -> None:
        """Tell the other ranks, where they vote next, that this one has given up."""
        if error is self._told:
            return
        self._told = error
        self._peers.vote(failed=True, least=math.inf, numbers=[1.0, 0.0, 0.0])
        self._peers.exchange(f"{type(error).__name__}: {error}")

    def share_buffers(self, model: nn.Module) -> None:
        """Do nothing: buffers of a sharded model are each rank's own."""

    def _within(self, run: Callable[[], object]) -> None:
        with self._schedule.micro_batch():
            run()

    def _stand_in(self) -> None:
        """Take part in what is left, if that is known; else the others are met in their next vote."""
        if self._schedule.is_known and (failure := insist(self._schedule.stand_in)) is not None:
            raise OutOfMemoryError(failure.text)

    def _ask(self) -> None:
        self._vote()

    def _vote(
        self, *, failure: Failure | None = None, least: float = math.inf, number: float = 0.0, more: float = 0.0
    ) -> tuple[float, float, float]:
        """Vote. All votes have the same form, so that a rank that has given up can meet the others in any of them."""
        vote = self._peers.vote(failed=failure is not None, least=least, numbers=[0.0, number, more])
        given_up, number, more = vote.sums
        if given_up:
            texts = self._peers.exchange("")
            said = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
            raise RankError(f"this step was given up on all ranks, because it failed on {'; '.join(said)}")
        if vote.failed:
            raise ShortageError(failure)
        return number, vote.least, more
