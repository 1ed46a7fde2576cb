"""StepMeter: takes a step of a copy of a model, and measures what it holds; of equal layers it runs only a few.

The first step runs whole, allocates the optimizer's state, and shows whether the layers are equal: what a few of them
predict for it must be what it did, operation by operation. From then on, few run. See `repeated_layers`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from penstock.memory.accounting.byte_counter import ByteCounter, Role, SumBuffer
from penstock.memory.cutting.split import arrays_of
from penstock.memory.model_tensors import LossFunction, state_tensors, storage_key
from penstock.memory.planning.activation_checkpointing import blocks_of
from penstock.memory.planning.byte_timeline import Timeline, TimelineCounter, as_roles, peak_of
from penstock.memory.planning.fake_copy import Copies
from penstock.memory.planning.repeated_layers import (
    BASE_LAYERS,
    Stack,
    confirms,
    extrapolated,
    marking,
    shortened,
    stacks_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBytes:
    """What a step held, in bytes."""

    static: int
    """All the time."""

    state: int
    """Of that, the optimizer's state."""

    backward_peak: int
    """At most, until the gradients were complete."""

    backward_bound: int
    """The same, with an allowance for workspaces that are not counted."""

    step_peak: int
    """At most, while the optimizer stepped."""

    step_bound: int

    backward_roles: dict[Role, int]
    step_roles: dict[Role, int]

    offloaded: int
    """Bytes of activations that went to the host."""

    def peak(self, *, offload_state: bool) -> tuple[int, dict[Role, int]]:
        """Return the most that is held, and what it consists of."""
        away = self.state if offload_state else 0
        if self.step_peak > self.backward_peak - away:
            return self.step_peak, self.step_roles
        return self.backward_peak - away, {**self.backward_roles, "optimizer": self.backward_roles["optimizer"] - away}

    def bound(self, *, offload_state: bool) -> int:
        """Return the most that may be held."""
        return max(self.step_bound, self.backward_bound - (self.state if offload_state else 0))


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


@dataclass(frozen=True, slots=True)
class _Backward:
    """What was held until the gradients were complete."""

    peak: int
    bound: int
    """The peak with workspaces that may be taken."""

    roles: dict[Role, int]
    offloaded: int


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
        warms_up: whether each step runs once more before it is measured: DTensor infers shapes with operations on
            whole tensors, the first time.
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
        warms_up: bool = False,
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
        self._warms_up = warms_up
        self._params, self._buffers = list(self._model.parameters()), list(self._model.buffers())
        self._gradients: list[Tensor | None] = []
        """Of the first step."""
        self._stacks: list[Stack] = []
        """Those whose layers are proven to be equal."""
        self._forward_counter: ByteCounter | None = None
        """Of all forwards, so that what the model keeps of one is known in the next."""
        self._keeps_products = False
        """Whether what is held after forward was kept by selective checkpointing, which autograd does not see."""
        self._confirmed: set[str] = set()
        """Modes in which six layers did what five and four predict."""
        self.multiplies = False
        """Whether matrices were multiplied."""
        self.workspace_ops: set[str] = set()
        """Operations that ran and take a workspace, which is not counted."""
        self.leaves_gradients_only = True
        """Whether dense gradients are all that forward and backward have left until now."""
        self._optimizer_step: tuple[dict[Role, int], int, int, dict[Role, int]] | None = None
        """What was held when the optimizer stepped, the peak meanwhile, its bound, and what the peak consisted of."""

    @property
    def repeated_layers(self) -> list[int]:
        """How many layers each stack has of which only a few run."""
        return [len(stack.layers) for stack in self._stacks]

    def first_step(self, micro_batches: list[Any]) -> None:
        """Take a step that allocates the optimizer's state, and find out whether layers are equal."""
        stacks = stacks_of(self._model) if self._fake else []
        counter = self._counter(ByteCounter)
        if stacks:
            lengths = [len(stack.layers) for stack in stacks]
            whole = self._timeline(stacks, lengths, micro_batches, accumulates=False)[0]
            self._gradients = [param.grad for param in self._params]
            few = self._few_layers(stacks, micro_batches, accumulates=False)
            found = None if few is None else extrapolated(few[0][0], [run for run, _ in few[1]], lengths)
            if few is not None and found is not None and confirms(whole, few[0][0], found, lengths):
                self._stacks = stacks
            self._restore_gradients()
            counter.watch(self._gradients, "gradients")
            self.leaves_gradients_only = _is_clean(as_roles(list(whole.values())[-1].rows[-1]))
        else:
            self._forward_backward(counter, micro_batches, accumulates=False)
        self._step_optimizer(counter)
        if not self.leaves_gradients_only:
            self._stacks = []
        self._optimizer_step = None  # later ones allocate no state

    def step(self, micro_batches: list[Any], *, accumulates: bool = False, mode: str = "plain") -> StepBytes:
        """Take a step of these micro-batches.

        Args:
            micro_batches: all that the step has.
            accumulates: add to the gradients of the step before. What a second micro-batch holds is known then
                without a first one like it.
            mode: how the blocks run.
        """
        counter = self._counter(ByteCounter)
        static = counter.live
        self._keeps_products = mode == "selective"
        if self._warms_up:
            self._forward_backward(self._counter(ByteCounter), micro_batches, accumulates=accumulates)
        held = self._backward_of_few_layers(micro_batches, counter, accumulates=accumulates, mode=mode)
        if held is None:
            self._host.nbytes = 0
            self._forward_backward(counter, micro_batches, accumulates=accumulates)
            roles = counter.by_role()
            held = _Backward(counter.peak, counter.bound, roles, self._host.nbytes)
        peak, bound, roles = self._step_optimizer(counter)
        workspace = self._products_nbytes if self.multiplies else 0
        for one in (held.roles, roles):
            one["temporaries"] += workspace
        state = {storage_key(one): one.nbytes for one in self._state() if one.ndim and not one.is_sparse}
        return StepBytes(
            static=static + workspace,
            state=sum(state.values()),
            backward_peak=held.peak + workspace,
            backward_bound=held.bound + workspace,
            step_peak=peak + workspace,
            step_bound=bound + workspace,
            backward_roles=held.roles,
            step_roles=roles,
            offloaded=held.offloaded,
        )

    def forward(self, part: Any, parts: int) -> StepBytes:
        """Compute outputs of `parts` micro-batches like this one, which are joined in the end.

        The first time shows what the model keeps: caches of its own.
        """
        counter = self._forward_counter = self._forward_counter or self._counter(ByteCounter)
        with torch.no_grad(), counter:
            self._loss_fn(self._model, part)
            counter.reset_peak()
            static = counter.live
            output = self._loss_fn(self._model, part)
        held, roles, with_output = counter.peak, counter.by_role(), counter.live
        del output
        nbytes = with_output - counter.live
        more = max((parts - 1) * nbytes, static + 2 * parts * nbytes - held) if parts > 1 else 0
        workspace = self._products_nbytes if counter.multiplies else 0
        self.workspace_ops |= counter.workspace_ops
        peak, bound = held + more + workspace, counter.bound + more + workspace
        roles["temporaries"] += more + workspace
        return StepBytes(
            static=static + workspace,
            state=0,
            backward_peak=peak,
            backward_bound=bound,
            step_peak=0,
            step_bound=0,
            backward_roles=roles,
            step_roles=roles,
            offloaded=0,
        )

    def count_flops(self) -> Flops:
        """Return the operations of a step of the whole batch, forward and backward."""
        if not self._stacks:
            return self._count_flops()
        base = [BASE_LAYERS] * len(self._stacks)
        with shortened(self._stacks, base):
            plain = self._count_flops()
        total, inside = plain.plain, plain.recomputed
        for number, stack in enumerate(self._stacks):
            with shortened(self._stacks, _one_less(base, number)):
                less = self._count_flops()
            times = len(stack.layers) - BASE_LAYERS
            total += times * (plain.plain - less.plain)
            inside += times * (plain.recomputed - less.recomputed)
        return Flops(total, inside)

    def _count_flops(self) -> Flops:
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

    def _counter(self, kind: type[_Counter]) -> _Counter:
        """Return a counter that knows what is held all the time."""
        counter = kind(grain_nbytes=self._grain_nbytes, runs_on_cpu=self._runs_on_cpu, sum_buffer=self._sum_buffer)
        counter.watch([*self._params, *self._buffers], "weights")
        counter.watch((leaf for leaf in arrays_of(self._batch) if isinstance(leaf, Tensor)), "inputs")
        counter.watch(self._state(), "optimizer")
        counter.watch(self._held, "communication")
        return counter

    def _restore_gradients(self) -> None:
        for param, gradient in zip(self._params, self._gradients, strict=True):
            param.grad = gradient

    def _forward_backward(self, counter: ByteCounter, micro_batches: list[Any], *, accumulates: bool) -> None:
        if accumulates and self._gradients:
            self._restore_gradients()
        for param in self._params:
            param.grad = param.grad if accumulates else None
        counter.watch((param.grad for param in self._params), "gradients")
        counter.reset_peak()
        begin = counter.begin if isinstance(counter, TimelineCounter) else _do_nothing
        with _watching_gradients(self._params, counter):
            for number, part in enumerate(micro_batches):
                begin(number, "forward")
                with counter, counter.label_saved_tensors():
                    loss = self._loss_fn(self._model, part)[0]
                if self._keeps_products:
                    counter.label_kept()
                begin(number, "backward")
                with counter:
                    loss.backward()
                del loss
        self.multiplies |= counter.multiplies
        self.workspace_ops |= counter.workspace_ops

    def _step_optimizer(self, counter: ByteCounter) -> tuple[int, int, dict[Role, int]]:
        """Return the most bytes held while the optimizer steps; it steps once for all that hold the same."""
        counter.reset_peak()
        held = counter.by_role()
        dense = all(param.grad is None or param.grad.layout is torch.strided for param in self._params)
        self.leaves_gradients_only &= dense and _is_clean(held)
        if self._optimizer_step is None or not self.leaves_gradients_only or self._optimizer_step[0] != held:
            if self._optimizer is not None:
                counter.item_value = 0.5 if self._fake else None  # optimizers read their step counters
                with counter:
                    self._optimizer.step()
                counter.watch(self._state(), "optimizer")
            self._optimizer_step = held, counter.peak, counter.bound, counter.by_role()
        _, peak, bound, roles = self._optimizer_step
        return peak, bound, dict(roles)

    def _backward_of_few_layers(
        self, micro_batches: list[Any], counter: ByteCounter, *, accumulates: bool, mode: str
    ) -> _Backward | None:
        """Return what follows from runs with few layers, and count the gradients in `counter`; None if nothing does."""
        if not self._stacks or not self.leaves_gradients_only:
            return None
        lengths = [len(stack.layers) for stack in self._stacks]
        few = self._few_layers(self._stacks, micro_batches, accumulates=accumulates)
        if few is None:
            return None
        (base, offloaded), less = few
        found = extrapolated(base, [run for run, _ in less], lengths)
        if found is None or not self._is_confirmed(mode, few, micro_batches, accumulates=accumulates):
            return None
        rows = list(found.values())
        if not _is_clean(as_roles(rows[-1][-1])):
            return None
        for (_, nbytes), length in zip(less, lengths, strict=True):
            offloaded += (length - BASE_LAYERS) * (few[0][1] - nbytes)
        self._restore_gradients()
        counter.watch(self._gradients, "gradients")
        peak, bound, roles = peak_of(rows)
        return _Backward(peak, bound, roles, offloaded)

    def _is_confirmed(self, mode: str, few: _FewRuns, micro_batches: list[Any], *, accumulates: bool) -> bool:
        """Return whether a run with a layer more does what the ones with few layers predict, once in each mode."""
        if mode not in self._confirmed:
            more = [BASE_LAYERS + 1] * len(self._stacks)
            (base, _), less = few
            found = extrapolated(base, [run for run, _ in less], more)
            run = self._timeline(self._stacks, more, micro_batches, accumulates=accumulates)[0]
            if found is None or not confirms(run, base, found, more):
                return False
            self._confirmed.add(mode)
        return True

    def _few_layers(self, stacks: list[Stack], micro_batches: list[Any], *, accumulates: bool) -> _FewRuns | None:
        """Run five layers of each stack, and four of one after the other; None if the model needs all of them."""
        base = [BASE_LAYERS] * len(stacks)
        try:
            return self._timeline(stacks, base, micro_batches, accumulates=accumulates), [
                self._timeline(stacks, _one_less(base, number), micro_batches, accumulates=accumulates)
                for number in range(len(stacks))
            ]
        except Exception:  # noqa: BLE001  the user's code, which the run of the whole model raises if it fails there too
            return None

    def _timeline(
        self, stacks: list[Stack], lengths: list[int], micro_batches: list[Any], *, accumulates: bool
    ) -> tuple[Timeline, int]:
        """Return what a step with stacks of these lengths does, and how many bytes it offloads.

        Garbage is not collected meanwhile: else when a tensor in a cycle is freed would depend on chance.
        """
        counter = self._counter(TimelineCounter)
        self._host.nbytes = 0
        with _without_collection(), shortened(stacks, lengths), marking(stacks, counter):
            self._forward_backward(counter, micro_batches, accumulates=accumulates)
        counter.begin(len(micro_batches), "end")
        return counter.timeline(), self._host.nbytes


_Counter = TypeVar("_Counter", bound=ByteCounter)
_Run = tuple[Timeline, int]
_FewRuns = tuple[_Run, list[_Run]]


def _is_clean(held: dict[Role, int]) -> bool:
    """Return whether nothing of forward and backward is left but gradients."""
    return held["temporaries"] == held["activations"] == 0


def _one_less(lengths: list[int], number: int) -> list[int]:
    return [length - (place == number) for place, length in enumerate(lengths)]


def _do_nothing(part: int, event: str) -> None:
    pass


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
