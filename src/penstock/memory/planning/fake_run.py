"""FakeRun: runs steps of a copy of the model, in each variant, and measures what they hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

from penstock.memory.accounting.byte_counter import ByteCounter, Role
from penstock.memory.microbatch.split import Split, arrays_of
from penstock.memory.model_tensors import LossFunction, state_tensors, storage_key
from penstock.memory.planning.activation_checkpointing import blocks_of, checkpoint_blocks
from penstock.memory.planning.fake_copy import Copies, fake_copies, real_copies
from penstock.memory.planning.step_variants import StepVariant

Mode = Literal["plain", "checkpointed", "offloaded", "state offloaded"]
MODES: tuple[Mode, ...] = ("plain", "checkpointed", "offloaded", "state offloaded")

_FLOPS_PER_S = 100e12
_LINK_BYTES_PER_S = 25e9
_PART_COST = 0.01
"""The fraction of a step that each further micro-batch is taken to cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _StepBytes:
    """What a step held, in bytes."""

    static: int
    """All the time."""

    state: int
    """Of that, the optimizer's state."""

    backward_peak: int
    """At most, until the gradients were complete."""

    step_peak: int
    """At most, while the optimizer stepped."""

    backward_roles: dict[Role, int]
    step_roles: dict[Role, int]

    def peak(self, *, offload_state: bool) -> tuple[int, dict[Role, int]]:
        """Return the most that is held, and what it consists of."""
        away = self.state if offload_state else 0
        if self.step_peak > self.backward_peak - away:
            return self.step_peak, self.step_roles
        return self.backward_peak - away, {**self.backward_roles, "optimizer": self.backward_roles["optimizer"] - away}


@dataclass(frozen=True, slots=True)
class _Flops:
    """Operations of a plain step, and of those the ones that checkpointed blocks compute twice."""

    plain: int
    recomputed: int


class FakeRun:
    """Steps of a copy of the model.

    Args:
        model: never changed.
        loss_fn: `(model, batch) -> (loss_sum, weight)`.
        batch: a whole one.
        optimizer: the model's; never changed.
        split: `(batch, parts) -> batches`.
        count_samples: `batch -> samples`.
        modes: which modes to run.
        grain_nbytes: the least that an allocation takes.
        products_nbytes: what the library for matrix products takes once, where the model runs.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batch: Any,
        optimizer: Optimizer | None,
        *,
        split: Split,
        count_samples: Callable[[Any], int],
        modes: Sequence[Mode],
        grain_nbytes: int,
        products_nbytes: int = 0,
    ) -> None:
        self._is_compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())
        self._model: nn.Module = getattr(model, "_orig_mod", model)
        self._loss_fn = loss_fn
        self._batch = batch
        self._optimizer = optimizer
        self._split = split
        self._count_samples = count_samples
        self._modes = modes
        self._grain_nbytes = grain_nbytes
        self._products_nbytes = products_nbytes
        self._workspace_ops: set[str] = set()
        self._errors: dict[str, Exception] = {}
        """Of modes in which the model does not run."""
        self._leaves_gradients_only = True
        """Whether dense gradients are all that forward and backward have left until now."""
        self._optimizer_step: tuple[dict[Role, int], int, dict[Role, int]] | None = None
        """What was held when the optimizer stepped, the most bytes meanwhile, and what they consisted of."""

    def warnings(self) -> Iterator[str]:
        """Yield what the variants do not show."""
        if self._workspace_ops:
            yield f"the workspace of {', '.join(sorted(self._workspace_ops))} is not seen: the peak may be higher"
        if self._is_compiled:
            yield "the model is compiled, and was planned as if it were not: fused operations save less"
        for mode, error in self._errors.items():
            yield f"the model does not run with its blocks {mode}, maybe for a cache (use_cache): {error_text(error)}"

    def run(self, *, fake: bool) -> list[StepVariant]:
        """Return all variants, from the whole batch down to one sample at a time.

        Args:
            fake: whether to run on fake tensors, which hold no bytes; else on copies of the real ones.
        """
        make_copies = fake_copies if fake else real_copies
        # A compiled model would be compiled for every size; and torch.compiler is not imported for other models.
        eager = torch.compiler.set_stance("force_eager") if self._is_compiled else contextlib.nullcontext()
        with eager, make_copies(self._model, self._optimizer, self._batch) as copies:
            counts = self._runnable_counts(copies, fake=fake)
            flops = self._count_flops(copies)
            found: list[StepVariant] = []
            if "plain" in self._modes:
                for count in counts:
                    found += self._run_parts(copies, count, flops, fake=fake)
            if blocks_of(copies[0]):
                for mode, host in (("checkpointed", None), ("offloaded", _FakeHost())):
                    if mode in self._modes:
                        found += self._run_checkpointed(
                            copies, counts, flops, mode, host, fake=fake, may_fail=bool(found)
                        )
        return found

    def _runnable_counts(self, copies: Copies, *, fake: bool) -> list[int]:
        """Return the numbers of parts to run: powers of two, and as many as there are samples.

        The first step, of the smallest micro-batches, allocates the optimizer's state.
        """
        size = self._count_samples(self._batch)
        counts = [1]
        while counts[-1] < size:
            counts.append(min(size, 2 * counts[-1]))
        try:
            self._step(copies, self._first_two(copies[2], counts[-1]), fake=fake)
        except ValueError:  # BatchNorm's, for a single sample
            if len(counts) == 1:
                raise
            counts.pop()
            self._step(copies, self._first_two(copies[2], counts[-1]), fake=fake)
        self._optimizer_step = None  # later ones allocate no state
        return counts

    def _run_checkpointed(
        self,
        copies: Copies,
        counts: list[int],
        flops: _Flops,
        mode: str,
        host: _FakeHost | None,
        *,
        fake: bool,
        may_fail: bool,
    ) -> list[StepVariant]:
        """Run the model with its blocks checkpointed; if it does not run, keep the error where it `may_fail`."""
        checkpoint_blocks(copies[0], offload=host is not None, saving=None if host is None else host.saving)
        variants: list[StepVariant] = []
        try:
            for count in counts:
                variants += self._run_parts(copies, count, flops, fake=fake, is_checkpointed=True, host=host)
        except Exception as error:
            if not may_fail:
                raise
            self._errors[mode] = error
            return []
        return [replace(variant, checkpoint=True, offload=host is not None) for variant in variants]

    def _run_parts(
        self,
        copies: Copies,
        parts: int,
        flops: _Flops,
        *,
        fake: bool,
        is_checkpointed: bool = False,
        host: _FakeHost | None = None,
    ) -> Iterator[StepVariant]:
        """Run a step in `parts` micro-batches; yield it with the optimizer's state on the device, and offloaded."""
        if host is not None:
            host.nbytes = 0
        micro_batches = self._first_two(copies[2], parts)
        accumulates = fake and self._leaves_gradients_only and _are_alike(micro_batches)
        if accumulates:
            del micro_batches[0]
        held = self._step(copies, micro_batches, fake=fake, accumulates=accumulates)
        extra = flops.recomputed / flops.plain if is_checkpointed and flops.plain else 0.0
        inputs = 0 if host is None else 2 * host.nbytes * parts // len(micro_batches)  # there and back
        for offload_state in [False] + [True] * ("state offloaded" in self._modes and held.state > 0):
            moved = inputs + 2 * held.state * offload_state
            transfer = moved / _LINK_BYTES_PER_S / (flops.plain / _FLOPS_PER_S) if flops.plain else 0.0
            peak, roles = held.peak(offload_state=offload_state)
            away = held.state if offload_state else 0
            yield StepVariant(
                micro_batch=-(-self._count_samples(copies[2]) // parts),
                parts=parts,
                checkpoint=False,
                offload=False,
                offload_state=offload_state,
                peak_nbytes=peak,
                by_role=roles,
                static_nbytes=held.static - away,
                backward_peak_nbytes=held.backward_peak - away,
                extra_flops=extra,
                moved_nbytes=moved,
                slowdown=1 + extra + transfer + _PART_COST * (parts - 1),
            )

    def _first_two(self, batch: Any, parts: int) -> list[Any]:
        """Return the first two micro-batches at most: later ones are like the second."""
        return list(self._split(batch, parts))[:2] if parts > 1 else [batch]

    def _step(self, copies: Copies, micro_batches: list[Any], *, fake: bool, accumulates: bool = False) -> _StepBytes:
        """Take a step of these micro-batches.

        Args:
            copies: what to step.
            micro_batches: all that the step has.
            fake: whether tensors hold no numbers.
            accumulates: add to the gradients of the step before. What a second micro-batch holds is known then
                without a first one like it.
        """
        model, optimizer, batch = copies
        counter = ByteCounter(grain_nbytes=self._grain_nbytes)
        counter.watch([*model.parameters(), *model.buffers()], "weights")
        counter.watch((leaf for leaf in arrays_of(batch) if isinstance(leaf, Tensor)), "inputs")
        counter.watch(state_tensors(optimizer), "optimizer")
        static = counter.live
        for param in model.parameters():
            param.grad = param.grad if accumulates else None
        counter.watch((param.grad for param in model.parameters()), "gradients")
        counter.reset_peak()
        with _watching_gradients(model, counter):
            for part in micro_batches:
                with counter, counter.label_saved_tensors():
                    loss = self._loss_fn(model, part)[0]
                with counter:
                    loss.backward()
                del loss
        backward_peak, backward_roles = counter.peak, counter.by_role()
        step_peak, step_roles = self._step_optimizer(copies, counter, fake=fake)
        self._workspace_ops |= counter.workspace_ops
        workspace = self._products_nbytes if counter.multiplies else 0
        for roles in (backward_roles, step_roles):
            roles["temporaries"] += workspace
        state = {storage_key(one): one.nbytes for one in state_tensors(optimizer) if one.ndim and not one.is_sparse}
        return _StepBytes(
            static=static + workspace,
            state=sum(state.values()),
            backward_peak=backward_peak + workspace,
            step_peak=step_peak + workspace,
            backward_roles=backward_roles,
            step_roles=step_roles,
        )

    def _step_optimizer(self, copies: Copies, counter: ByteCounter, *, fake: bool) -> tuple[int, dict[Role, int]]:
        """Return the most bytes held while the optimizer steps, by role; it steps once for all that hold the same."""
        model, optimizer, _ = copies
        counter.reset_peak()
        held = counter.by_role()
        dense = all(param.grad is None or param.grad.layout is torch.strided for param in model.parameters())
        self._leaves_gradients_only &= dense and held["temporaries"] == held["activations"] == 0
        if self._optimizer_step is None or not self._leaves_gradients_only or self._optimizer_step[0] != held:
            if optimizer is not None:
                counter.item_value = 0.5 if fake else None  # optimizers read their step counters
                with counter:
                    optimizer.step()
                counter.watch(state_tensors(optimizer), "optimizer")
            self._optimizer_step = held, counter.peak, counter.by_role()
        _, peak, roles = self._optimizer_step
        return peak, dict(roles)

    def _count_flops(self, copies: Copies) -> _Flops:
        model, _, batch = copies
        names = {name for name, _ in blocks_of(model)}
        with FlopCounterMode(display=False) as counter:
            loss = self._loss_fn(model, batch)[0]
        forward = counter.get_total_flops()
        inside = sum(
            sum(counts.values())
            for module, counts in counter.get_flop_counts().items()
            if module.partition(".")[2] in names
        )
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return _Flops(forward + counter.get_total_flops(), inside)


class _FakeHost:
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


def _are_alike(parts: list[Any]) -> bool:
    """Return whether there are two micro-batches, of arrays of the same sizes and nothing else that differs."""
    if len(parts) != 2:
        return False
    (one, first), (other, second) = map(tree_flatten, parts)
    sizes = [[(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in part] for part in (one, other)]
    return first == second and sizes[0] == sizes[1]


@contextlib.contextmanager
def _watching_gradients(model: nn.Module, counter: ByteCounter) -> Iterator[None]:
    hooks = [
        param.register_post_accumulate_grad_hook(lambda p: counter.watch([p.grad], "gradients"))
        for param in model.parameters()
        if param.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def error_text(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
