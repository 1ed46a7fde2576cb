"""StepMeter: takes steps of a copy of a model, and measures what they hold.

The first step allocates the optimizer's state, and is not measured.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from penstock.memory.accounting.byte_counter import ROLES, ByteCounter, Role, SumBuffer
from penstock.memory.cutting.split import arrays_of
from penstock.memory.model_tensors import LossFunction, state_tensors
from penstock.memory.planning.activation_checkpointing import blocks_of
from penstock.memory.planning.fake_copy import Copies


class Peak(NamedTuple):
    """The most that was held."""

    roles: dict[Role, int]
    bound: int
    """With an allowance for workspaces that are not counted."""

    @property
    def nbytes(self) -> int:
        """All roles together."""
        return sum(self.roles.values())

    def between(self, other: Peak, share: float) -> Peak:
        """Return what lies `share` of the way to another."""
        roles = {role: _between(self.roles[role], other.roles[role], share) for role in ROLES}
        return Peak(roles, max(sum(roles.values()), _between(self.bound, other.bound, share)))


def _between(one: int, more: int, share: float) -> int:
    return math.ceil(one + share * (more - one))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBytes:
    """What a step held, in bytes."""

    static: int
    """All the time."""

    backward: Peak
    """Until the gradients were complete."""

    optimizer: Peak
    """While the optimizer stepped."""

    offloaded: int = 0
    """Bytes of activations that went to the host."""

    @property
    def peak(self) -> Peak:
        """The larger one."""
        return max(self.backward, self.optimizer, key=lambda one: one.nbytes)

    def between(self, other: StepBytes, share: float) -> StepBytes:
        """Return what a step holds whose micro-batches lie between those of two others, `share` of the way.

        What is held at any moment grows with the samples in a straight line, and the most of several lines lies below
        what connects two of its points. So no step holds more than this, but for rounding.
        """
        return StepBytes(
            static=self.static,
            backward=self.backward.between(other.backward, share),
            optimizer=self.optimizer.between(other.optimizer, share),
            offloaded=_between(self.offloaded, other.offloaded, share),
        )


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of a plain step, and of those the ones that checkpointed blocks compute twice."""

    plain: int
    recomputed: int


class FakeHost:
    """Does what torch's `save_on_cpu` does, on a host whose memory is not counted as the device's."""

    def __init__(self) -> None:
        self.nbytes = 0

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context."""

        def pack(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
            self.nbytes += tensor.nbytes
            return tensor.shape, tensor.dtype, tensor.device

        def unpack(packed: tuple[torch.Size, torch.dtype, torch.device]) -> Tensor:
            size, dtype, device = packed
            return torch.zeros(size, dtype=dtype, device=device)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class StepMeter:
    """Measures steps of these copies.

    Args:
        copies: the model, its optimizer and the whole batch.
        loss_fn: `(model, batch) -> (loss_sum, weight)`.
        fake: whether tensors hold no numbers.
        grain_nbytes: the least that an allocation takes.
        products_nbytes: what the library for matrix products takes once, where the model runs.
        runs_on_cpu: whether the model will run there.
        sum_buffer: see `ByteCounter`.
        host: where activations go when they are offloaded.
        held: buffers of communication that are held all the time.
    """

    def __init__(
        self,
        copies: Copies,
        loss_fn: LossFunction,
        *,
        fake: bool,
        grain_nbytes: int,
        products_nbytes: int,
        runs_on_cpu: bool,
        sum_buffer: SumBuffer | None,
        host: FakeHost,
        held: Sequence[Tensor] = (),
    ) -> None:
        self._model, self._optimizer, self._batch = copies
        self._loss_fn = loss_fn
        self._fake = fake
        self._grain_nbytes = grain_nbytes
        self._products_nbytes = products_nbytes
        self._runs_on_cpu = runs_on_cpu
        self._sum_buffer = sum_buffer
        self._host = host
        self._held = held
        self._params, self._buffers = list(self._model.parameters()), list(self._model.buffers())
        self._forward_counter: ByteCounter | None = None
        """Of all forwards, so that what the model keeps of one is known in the next."""
        self._keeps_products = False
        """Whether what is held after forward was kept by selective checkpointing, which autograd does not see."""
        self.multiplies = False
        """Whether matrices were multiplied."""
        self.workspace_ops: set[str] = set()
        """Operations that ran and take a workspace, which is not counted."""
        self.leaves_gradients_only = True
        """Whether dense gradients are all that forward and backward have left until now."""
        self._optimizer_step: tuple[dict[Role, int], Peak] | None = None
        """What was held when the optimizer stepped, and the peak meanwhile."""

    def first_step(self, micro_batches: list[Any]) -> None:
        """Take a step that allocates the optimizer's state."""
        counter = self._counter()
        self._forward_backward(counter, micro_batches, accumulates=False)
        self._step_optimizer(counter)
        self._optimizer_step = None  # later ones allocate no state

    def step(self, micro_batches: list[Any], *, accumulates: bool = False, keeps_products: bool = False) -> StepBytes:
        """Take a step of these micro-batches.

        Args:
            micro_batches: all that the step has.
            accumulates: add to the gradients of the step before. What a second micro-batch holds is known then
                without a first one like it.
            keeps_products: whether what is held after forward was kept by selective checkpointing, which autograd does
                not see.
        """
        counter = self._counter()
        static = counter.live
        self._keeps_products = keeps_products
        self._host.nbytes = 0
        self._forward_backward(counter, micro_batches, accumulates=accumulates)
        backward = Peak(counter.by_role(), counter.bound)
        optimizer = self._step_optimizer(counter)
        workspace = self._products_nbytes if self.multiplies else 0
        return StepBytes(
            static=static + workspace,
            backward=_with_temporaries(backward, workspace),
            optimizer=_with_temporaries(optimizer, workspace),
            offloaded=self._host.nbytes,
        )

    def forward(self, part: Any, parts: int) -> StepBytes:
        """Compute outputs of `parts` micro-batches like this one, which are joined in the end.

        The first time shows what the model keeps: caches of its own.
        """
        counter = self._forward_counter = self._forward_counter or self._counter()
        with torch.no_grad(), counter:
            self._loss_fn(self._model, part)
            counter.reset_peak()
            static = counter.live
            output = self._loss_fn(self._model, part)
        held, with_output = Peak(counter.by_role(), counter.bound), counter.live
        del output
        nbytes = with_output - counter.live
        more = max((parts - 1) * nbytes, static + 2 * parts * nbytes - held.nbytes) if parts > 1 else 0
        workspace = self._products_nbytes if counter.multiplies else 0
        self.workspace_ops |= counter.workspace_ops
        peak = _with_temporaries(held, more + workspace)
        return StepBytes(static=static + workspace, backward=peak, optimizer=Peak(dict.fromkeys(ROLES, 0), 0))

    def count_flops(self) -> Flops:
        """Return the operations of a step of the whole batch, forward and backward."""
        names = {name for name, _ in blocks_of(self._model)}
        with FlopCounterMode(display=False) as counter:
            loss = self._loss_fn(self._model, self._batch)[0]
        forward = counter.get_total_flops()
        inside = sum(
            sum(counts.values())
            for module, counts in counter.get_flop_counts().items()
            if module.partition(".")[2] in names
        )
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return Flops(forward + counter.get_total_flops(), inside)

    def _state(self) -> list[Tensor]:
        return state_tensors(self._optimizer)

    def _counter(self) -> ByteCounter:
        """Return a counter that knows what is held all the time."""
        counter = ByteCounter(
            grain_nbytes=self._grain_nbytes, runs_on_cpu=self._runs_on_cpu, sum_buffer=self._sum_buffer
        )
        counter.watch([*self._params, *self._buffers], "weights")
        counter.watch((leaf for leaf in arrays_of(self._batch) if isinstance(leaf, Tensor)), "inputs")
        counter.watch(self._state(), "optimizer")
        counter.watch(self._held, "communication")
        return counter

    def _forward_backward(self, counter: ByteCounter, micro_batches: list[Any], *, accumulates: bool) -> None:
        for param in self._params:
            param.grad = param.grad if accumulates else None
        counter.watch((param.grad for param in self._params), "gradients")
        counter.reset_peak()
        with _watching_gradients(self._params, counter):
            for part in micro_batches:
                with counter, counter.label_saved_tensors():
                    loss = self._loss_fn(self._model, part)[0]
                if self._keeps_products:
                    counter.label_kept()
                with counter:
                    loss.backward()
                del loss
        self.multiplies |= counter.multiplies
        self.workspace_ops |= counter.workspace_ops

    def _step_optimizer(self, counter: ByteCounter) -> Peak:
        """Return the most that is held while the optimizer steps; it steps once for all that hold the same."""
        counter.reset_peak()
        held = counter.by_role()
        dense = all(param.grad is None or param.grad.layout is torch.strided for param in self._params)
        self.leaves_gradients_only &= dense and held["temporaries"] == held["activations"] == 0
        if self._optimizer_step is None or not self.leaves_gradients_only or self._optimizer_step[0] != held:
            if self._optimizer is not None:
                counter.item_value = 0.5 if self._fake else None  # optimizers read their step counters
                with counter:
                    self._optimizer.step()
                counter.watch(self._state(), "optimizer")
            self._optimizer_step = held, Peak(counter.by_role(), counter.bound)
        return self._optimizer_step[1]


def _with_temporaries(peak: Peak, nbytes: int) -> Peak:
    return Peak({**peak.roles, "temporaries": peak.roles["temporaries"] + nbytes}, peak.bound + nbytes)


@contextlib.contextmanager
def _watching_gradients(params: Sequence[Tensor], counter: ByteCounter) -> Iterator[None]:
    hooks = [
        param.register_post_accumulate_grad_hook(lambda p: counter.watch([p.grad], "gradients"))
        for param in params
        if param.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
