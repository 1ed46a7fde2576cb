"""FakeRun: runs steps of a copy of the model, in each variant, and measures what they hold."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from penstock.core.units import size_text
from penstock.memory.accounting.byte_counter import SumBuffer
from penstock.memory.cutting.split import Split
from penstock.memory.model_tensors import LossFunction
from penstock.memory.planning.activation_checkpointing import blocks_of, checkpoint_blocks
from penstock.memory.planning.bf16_training import to_bf16
from penstock.memory.planning.fake_copy import Copies, fake_copies, real_copies
from penstock.memory.planning.parallel_layout import ParallelLayout
from penstock.memory.planning.step_meter import FakeHost, Flops, StepBytes, StepMeter
from penstock.memory.planning.step_variants import StepVariant

Mode = Literal["plain", "selective", "checkpointed", "offloaded", "state offloaded"]
MODES: tuple[Mode, ...] = ("plain", "selective", "checkpointed", "offloaded", "state offloaded")

Progress = Callable[[int, int], None]
"""Called with how many steps were run, and how many there are."""

_FLOPS_PER_S = 100e12
_LINK_BYTES_PER_S = 25e9
_RECOMPUTE_COST = 0.05
"""The fraction of a step that all but products is taken to cost, when it is computed again."""
_PART_COST = 0.01
"""The fraction of a step that each further micro-batch is taken to cost."""


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
        cuts: whether batches may be cut.
        layout: how the model is spread over ranks; None for one.
        bf16: whether parameters are converted.
        forward_only: whether there is neither backward nor an optimizer; `loss_fn` gives any output.
        grain_nbytes: the least that an allocation takes.
        products_nbytes: what the library for matrix products takes once, where the model runs.
        sum_buffer: see `ByteCounter`.
        progress: called with the number of steps that were taken, and that there are.
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
        cuts: bool = True,
        layout: ParallelLayout | None = None,
        bf16: bool = False,
        forward_only: bool = False,
        grain_nbytes: int,
        products_nbytes: int = 0,
        sum_buffer: SumBuffer | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._is_compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())
        self._model: nn.Module = getattr(model, "_orig_mod", model)
        self._loss_fn = loss_fn
        self._batch = batch
        self._optimizer = optimizer
        self._split = split
        self._count_samples = count_samples
        self._modes = modes
        self._cuts = cuts
        self._layout = layout
        self._bf16 = bf16
        self._forward_only = forward_only
        self._grain_nbytes = grain_nbytes
        self._products_nbytes = products_nbytes
        self._sum_buffer = sum_buffer
        self._progress = progress
        self._runs_on_cpu = any(param.device.type == "cpu" for param in model.parameters())
        self.multiplies = False
        """Whether the step multiplies matrices."""
        self._workspace_ops: set[str] = set()
        self._repeated_layers: list[int] = []
        self._cache_text = ""
        self._errors: dict[str, Exception] = {}
        """Of modes in which the model does not run."""

    def warnings(self) -> Iterator[str]:
        """Yield what the variants do not show."""
        if self._workspace_ops:
            names = ", ".join(sorted(self._workspace_ops))
            yield f"the workspace of {names} is not seen: the peak may be higher, up to the bytes after 'to'"
        if self._is_compiled:
            yield "the model is compiled, and was planned as if it were not: fused operations save less"
        if self._cache_text:
            yield self._cache_text
        for mode, error in self._errors.items():
            why = "set model.config.use_cache = False" if _has_cache(self._model) else "maybe for a cache (use_cache)"
            yield f"the model does not run with its blocks {mode}, {why}: {error_text(error)}"
        if self._repeated_layers:
            counts = " and ".join(map(str, self._repeated_layers))
            yield f"of {counts} equal layers some were run, and the others follow from them"

    def run(self, *, fake: bool) -> list[StepVariant]:
        """Return all variants, from the whole batch down to one sample at a time.

        Args:
            fake: whether to run on fake tensors, which hold no bytes; else on copies of the real ones.
        """
        make_copies = fake_copies if fake else real_copies
        # A compiled model would be compiled for every size; and torch.compiler is not imported for other models.
        eager = torch.compiler.set_stance("force_eager") if self._is_compiled else contextlib.nullcontext()
        pretended = self._layout.pretended() if self._layout is not None else contextlib.nullcontext()
        with eager, pretended as mesh, make_copies(self._model, self._optimizer, self._batch) as copies:
            host, held = FakeHost(), []
            if self._bf16:
                to_bf16(*copies[:2])
            if self._layout is not None:
                with unset_fake_temporarily():  # a device mesh reads the numbers of its ranks; parameters stay fake
                    held = self._layout.spread(*copies[:2], mesh)
            meter = StepMeter(
                copies,
                self._loss_fn,
                fake=fake,
                grain_nbytes=self._grain_nbytes,
                products_nbytes=self._products_nbytes,
                runs_on_cpu=self._runs_on_cpu,
                sum_buffer=self._sum_buffer,
                host=host,
                held=held,
                warms_up=self._layout is not None and self._layout.parallelize is not None,
            )
            run_all = self._run_forward if self._forward_only else functools.partial(self._run_modes, host=host)
            found = list(run_all(copies, meter, fake=fake))
        self._workspace_ops = meter.workspace_ops
        self.multiplies = meter.multiplies
        self._repeated_layers = meter.repeated_layers
        return found

    def _run_forward(self, copies: Copies, meter: StepMeter, *, fake: bool) -> Iterator[StepVariant]:
        counts = self._counts()
        for index, parts in enumerate(counts):
            self._report(index, len(counts))
            held = meter.forward(self._first_two(copies[2], parts)[0], parts)
            yield self._variant(held, parts, "plain", size=self._count_samples(copies[2]))

    def _run_modes(self, copies: Copies, meter: StepMeter, *, host: FakeHost, fake: bool) -> list[StepVariant]:
        has_blocks = bool(blocks_of(copies[0]))
        ways = ["plain"] * ("plain" in self._modes)
        ways += [mode for mode in ("selective", "checkpointed", "offloaded") if mode in self._modes and has_blocks]
        counts = self._runnable_counts(copies, meter)
        flops = meter.count_flops()
        found: list[StepVariant] = []
        for number, mode in enumerate(ways):
            if mode != "plain":
                saving = host.saving if mode == "offloaded" else None
                checkpoint_blocks(copies[0], selective=mode == "selective", saving=saving)
            variants: list[StepVariant] = []
            try:
                for index, count in enumerate(counts):
                    self._report(number * len(counts) + index, len(ways) * len(counts))
                    variants += self._run_parts(copies, meter, count, flops, mode, fake=fake)
            except Exception as error:
                if mode == "plain" or not found:
                    raise
                self._errors[mode] = error
            else:
                found += variants
                if mode == "checkpointed" and _has_cache(copies[0]):
                    self._note_cache(copies, meter, variants[0])
        return found

    def _note_cache(self, copies: Copies, meter: StepMeter, cached: StepVariant) -> None:
        """Note whether keys and values that the model keeps hide what checkpointing saves."""
        config: Any = copies[0].config
        config.use_cache = False
        held = meter.step(self._first_two(copies[2], cached.parts), mode="checkpointed without a cache")
        peak = held.peak(offload_state=False)[0]
        config.use_cache = True
        if peak < cached.peak_nbytes:
            self._cache_text = (
                f"with model.config.use_cache = False, {cached.describe()} takes {size_text(peak)} instead of "
                f"{size_text(cached.peak_nbytes)}: the cache keeps what checkpointing would not"
            )

    def _report(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(done, total)

    def _counts(self) -> list[int]:
        """Return the numbers of parts to run: powers of two, and as many as there are samples."""
        size, counts = self._count_samples(self._batch), [1]
        while self._cuts and counts[-1] < size:
            counts.append(min(size, 2 * counts[-1]))
        return counts

    def _runnable_counts(self, copies: Copies, meter: StepMeter) -> list[int]:
        """Take the first step, of the smallest micro-batches, which allocates the optimizer's state."""
        counts = self._counts()
        try:
            meter.first_step(self._first_alike(copies[2], counts[-1]))
        except ValueError:  # BatchNorm's, for a single sample
            if len(counts) == 1:
                raise
            counts.pop()
            meter.first_step(self._first_alike(copies[2], counts[-1]))
        return counts

    def _run_parts(
        self, copies: Copies, meter: StepMeter, parts: int, flops: Flops, mode: str, *, fake: bool
    ) -> Iterator[StepVariant]:
        """Run a step in `parts` micro-batches; yield it with the optimizer's state on the device, and offloaded."""
        micro_batches = self._first_two(copies[2], parts)
        accumulates = fake and meter.leaves_gradients_only and _are_alike(micro_batches)
        if accumulates:
            del micro_batches[0]
        held = meter.step(micro_batches, accumulates=accumulates, mode=mode)
        extra = flops.recomputed / flops.plain if mode in ("checkpointed", "offloaded") and flops.plain else 0.0
        extra += _RECOMPUTE_COST * (mode == "selective")
        inputs = 2 * held.offloaded * parts // len(micro_batches)  # there and back
        for offload_state in [False] + [True] * ("state offloaded" in self._modes and held.state > 0):
            moved = inputs + 2 * held.state * offload_state
            transfer = moved / _LINK_BYTES_PER_S / (flops.plain / _FLOPS_PER_S) if flops.plain else 0.0
            one = self._variant(held, parts, mode, size=self._count_samples(copies[2]), offload_state=offload_state)
            yield replace(one, extra_flops=extra, moved_nbytes=moved, slowdown=one.slowdown + extra + transfer)

    def _variant(
        self, held: StepBytes, parts: int, mode: str, *, size: int, offload_state: bool = False
    ) -> StepVariant:
        """Return what a step held as a variant that neither computes again nor moves anything."""
        peak, roles = held.peak(offload_state=offload_state)
        away = held.state if offload_state else 0
        return StepVariant(
            micro_batch=-(-size // parts),
            parts=parts,
            checkpoint=mode != "plain",
            offload=mode == "offloaded",
            selective=mode == "selective",
            offload_state=offload_state,
            bf16=self._bf16,
            peak_nbytes=peak,
            bound_nbytes=held.bound(offload_state=offload_state),
            by_role=roles,
            static_nbytes=held.static - away,
            backward_peak_nbytes=held.backward_peak - away,
            extra_flops=0.0,
            moved_nbytes=0,
            slowdown=1 + _PART_COST * (parts - 1),
        )

    def _first_alike(self, batch: Any, parts: int) -> list[Any]:
        """Return the first two micro-batches, or one if they are alike."""
        found = self._first_two(batch, parts)
        return found[:1] if _are_alike(found) else found

    def _first_two(self, batch: Any, parts: int) -> list[Any]:
        """Return the first two micro-batches at most: later ones are like the second."""
        return list(self._split(batch, parts))[:2] if parts > 1 else [batch]


def _has_cache(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "use_cache", False))


def _are_alike(parts: list[Any]) -> bool:
    """Return whether there are two micro-batches, of arrays of the same sizes and nothing else that differs."""
    if len(parts) != 2:
        return False
    (one, first), (other, second) = map(tree_flatten, parts)
    return first == second and all(map(_is_alike, one, other))


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype
    return isinstance(one, (int, float, str, type(None))) and type(one) is type(other) and bool(one == other)


def error_text(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
