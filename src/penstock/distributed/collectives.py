"""CollectiveSchedule: the collectives inside a sharded model (FSDP2), and completing them with zeros after a failure.

Every rank all-gathers the parameters of a layer when it reaches it, and reduce-scatters its gradients. A rank that has
run out of memory does not reach the next layer, and the others would wait for ever. But the collectives of a
micro-batch depend on the model only, not on the samples. So they are recorded in the first micro-batch, and a rank that
fails in a later one takes part in those that are left with zeros. The others finish theirs, and learn of the failure in
the vote that follows.

While that list is not known, in the first micro-batch and in models whose collectives change, there is a vote before
each collective, in which all ranks leave the model together.
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

from penstock.distributed.rank_group import retry_on_oom

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the latter until torch 2.12
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class _Collective:
    """One collective, as this rank takes part in it."""

    group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype
    output_numel: int
    input_numel: int
    is_reduce_scatter: bool = False
    """Whether it is a reduce-scatter of gradients; else it is an all-gather of parameters."""

    op: Any = field(default=None, compare=False)
    """How gradients are reduced."""

    def submit(self, output: Tensor, given: Tensor) -> Any:
        """Submit it; return the work to wait for."""
        if self.is_reduce_scatter:
            return _reduce_scatter(output, given, op=self.op, group=self.group, async_op=True)
        return _all_gather(output, given, group=self.group, async_op=True)

    def submit_zeros(self) -> Any:
        """Submit it with zeros; its result is worthless."""
        given = retry_on_oom(functools.partial(torch.zeros, self.input_numel, dtype=self.dtype, device=self.device))
        output = retry_on_oom(functools.partial(torch.empty, self.output_numel, dtype=self.dtype, device=self.device))
        return retry_on_oom(functools.partial(self.submit, output, given))


class CollectiveSchedule:
    """Records a model's collectives, and completes those that are left with zeros.

    Args:
        model: with FSDP2 modules. Their custom collectives are set.
        vote: called before each collective as long as the list is not known; it raises to leave the model.
    """

    def __init__(self, model: nn.Module, vote: Callable[[], None]) -> None:
        self._vote = vote
        self._known: list[_Collective] | None = None
        self._changes = False
        """Whether two micro-batches had different collectives."""
        self._done: list[_Collective] = []
        self._is_recording = False
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._roots = list(_outermost(model))
        for module in modules:
            module.set_custom_all_gather(_RecordedAllGather(self))
            module.set_custom_reduce_scatter(_RecordedReduceScatter(self))

    @property
    def is_known(self) -> bool:
        """Whether this rank knows which collectives of the current micro-batch are left."""
        return self._known is not None and not self._changes

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Record the collectives inside. Those outside (of an evaluation, say) are not recorded and not voted on."""
        self._done, self._is_recording = [], True
        try:
            yield
        finally:
            self._is_recording = False
        if self._known is not None and self._known != self._done:
            self._changes = True
        self._known = self._done

    def complete_with_zeros(self) -> None:
        """Take part, with zeros, in what is left of the micro-batch that has failed here. Only where `is_known`.

        What this rank would have received is lost, so all ranks have to repeat the micro-batch. May be called again
        after it has failed.
        """
        assert self._known is not None
        for collective in self._known[len(self._done) :]:
            work = collective.submit_zeros()
            self._done.append(collective)
            work.wait()

    def can_reset(self) -> bool:
        """Return whether the model can be used again after an interrupted micro-batch (torch 2.13 and later)."""
        return all(hasattr(root, "reset_iter_state") for root in self._roots)

    def reset(self) -> None:
        """Put the model into the state between two micro-batches. May be called again after it has failed.

        Raises:
            RuntimeError: the model has never been run.
        """
        for root in self._roots:
            for param in root.parameters():  # type: ignore[attr-defined]
                param.grad = None  # of all-gathered parameters too: torch would add to these gradients next time
            root.reset_iter_state()

    def run(self, collective: _Collective, output: Tensor, given: Tensor, *, async_op: bool) -> Any:
        """Run a collective with this rank's own data, and record it."""
        if self._is_recording:
            at = len(self._done)
            if self._known is not None and (at >= len(self._known) or self._known[at] != collective):
                self._changes = True
            if not self.is_known:
                self._vote()
        work = retry_on_oom(functools.partial(collective.submit, output, given))
        if self._is_recording:
            self._done.append(collective)
        if async_op:
            return work
        work.wait()  # may itself run out of memory: gloo allocates when it divides for an average
        return None


class _RecordedComm(Comm):
    def __init__(self, schedule: CollectiveSchedule) -> None:
        self._schedule = schedule

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _RecordedAllGather(_RecordedComm, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        return self._schedule.run(
            _Collective(group, input_tensor.device, input_tensor.dtype, output_tensor.numel(), input_tensor.numel()),
            output_tensor,
            input_tensor,
            async_op=async_op,
        )


class _RecordedReduceScatter(_RecordedComm, ReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        return self._schedule.run(
            _Collective(
                group, input_tensor.device, input_tensor.dtype, output_tensor.numel(), input_tensor.numel(), True, op
            ),
            output_tensor,
            input_tensor,
            async_op=async_op,
        )


def _outermost(module: nn.Module) -> Iterator[FSDPModule]:
    """Yield the sharded modules that are in no other sharded module."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)
