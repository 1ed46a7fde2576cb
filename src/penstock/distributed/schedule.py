"""The collectives inside of a sharded model (FSDP2): which there are, and standing in for one's part of them.

Every rank gathers the parameters of a layer when it gets there, and shares out its gradients. A rank that has run out
of memory gets nowhere, and the others would wait for it for ever. But which collectives a micro-batch consists of
depends on the model only, not on the samples. So the first micro-batch is taken note of, and a rank that fails in a
later one takes part in what is left of it with zeros. The others finish theirs, and learn of the failure in the vote
that follows.

While that list is not known, in the first micro-batch and in models whose collectives change, there is a vote before
each collective, by which all ranks leave the model together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter

from penstock.distributed.peers import insisted

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the latter until torch 2.12
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class _Collective:
    """One meeting of all ranks, as this rank takes part in it."""

    group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype
    output_numel: int
    input_numel: int
    is_sum: bool = False
    """Whether gradients are shared out; else parameters are gathered."""

    op: Any = field(default=None, compare=False)
    """How gradients are added up."""

    def submit(self, output: Tensor, given: Tensor) -> Any:
        """Take part in it; return the work to wait for."""
        if self.is_sum:
            return _reduce_scatter(output, given, op=self.op, group=self.group, async_op=True)
        return _all_gather(output, given, group=self.group, async_op=True)

    def submit_zeros(self) -> Any:
        """Take part in it with zeros; what comes is to be dropped."""
        given = insisted(functools.partial(torch.zeros, self.input_numel, dtype=self.dtype, device=self.device))
        got = insisted(functools.partial(torch.empty, self.output_numel, dtype=self.dtype, device=self.device))
        return insisted(functools.partial(self.submit, got, given))


class Schedule:
    """Takes note of a model's collectives, and stands in for this rank in those that are left.

    Args:
        model: with FSDP2 modules. Their custom collectives are set.
        ask: called before each collective as long as the list is not known; it raises to leave the model.
    """

    def __init__(self, model: nn.Module, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._known: list[_Collective] | None = None
        self._changes = False
        """Whether the list has turned out to be another in another micro-batch."""
        self._done: list[_Collective] = []
        self._is_on = False
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._roots = list(_outermost(model))
        for module in modules:
            module.set_custom_all_gather(_NotedAllGather(self))
            module.set_custom_reduce_scatter(_NotedReduceScatter(self))

    @property
    def is_known(self) -> bool:
        """Whether this rank can stand in for what is left of the micro-batch under way."""
        return self._known is not None and not self._changes

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Take note of what is done inside; outside of it (an evaluation, say) collectives are nobody's business."""
        self._done, self._is_on = [], True
        try:
            yield
        finally:
            self._is_on = False
        if self._known is not None and self._known != self._done:
            self._changes = True
        self._known = self._done

    def stand_in(self) -> None:
        """Take part in what is left of the micro-batch that has failed here. Only where `is_known`.

        May be called again after it has failed.
        What this rank would have received is lost, so the micro-batch is to be repeated on all ranks.
        """
        assert self._known is not None
        for collective in self._known[len(self._done) :]:
            work = collective.submit_zeros()
            self._done.append(collective)
            work.wait()

    def can_reset(self) -> bool:
        """Return whether a model can be gone on with that was left in the middle (torch 2.13 and later)."""
        return all(hasattr(root, "reset_iter_state") for root in self._roots)

    def reset(self) -> None:
        """Let the model be as between two micro-batches. May be called again after it has failed.

        Raises:
            RuntimeError: the model has never been run.
        """
        for root in self._roots:
            for param in root.parameters():  # type: ignore[attr-defined]
                param.grad = None  # of gathered ones too: torch would add to these gradients next time
            root.reset_iter_state()

    def meet(self, collective: _Collective, output: Tensor, given: Tensor, *, async_op: bool) -> Any:
        """Take part in a collective in earnest."""
        if self._is_on:
            at = len(self._done)
            if self._known is not None and (at >= len(self._known) or self._known[at] != collective):
                self._changes = True
            if not self.is_known:
                self._ask()
        work = insisted(functools.partial(collective.submit, output, given))
        if self._is_on:
            self._done.append(collective)
        if async_op:
            return work
        work.wait()  # may run out of memory by itself: gloo divides what is an average then
        return None


class _Noted(Comm):
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _NotedAllGather(_Noted, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        return self._schedule.meet(
            _Collective(group, input_tensor.device, input_tensor.dtype, output_tensor.numel(), input_tensor.numel()),
            output_tensor,
            input_tensor,
            async_op=async_op,
        )


class _NotedReduceScatter(_Noted, ReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        return self._schedule.meet(
            _Collective(
                group, input_tensor.device, input_tensor.dtype, output_tensor.numel(), input_tensor.numel(), True, op
            ),
            output_tensor,
            input_tensor,
            async_op=async_op,
        )


def _outermost(module: nn.Module) -> Iterator[FSDPModule]:
    """Yield the sharded modules that lie in no other."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)
