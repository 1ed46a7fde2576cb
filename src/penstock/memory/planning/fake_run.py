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

from penstock.memory.accounting.byte_counter import SumBuffer
from penstock.memory.cutting.split import Split
from penstock.memory.model_tensors import LossFunction
from penstock.memory.planning.activation_checkpointing import blocks_of, checkpoint_blocks
from penstock.memory.planning.fake_copy import Copies, fake_copies, real_copies
from penstock.memory.planning.parallel_layout import ParallelLayout
from penstock.memory.planning.step_meter import FakeHost, Flops, StepBytes, StepMeter
from penstock.memory.planning.step_variants import StepVariant

Mode = Literal["plain", "selective", "checkpointed", "offloaded"]
MODES: tuple[Mode, ...] = ("plain", "selective", "checkpointed", "offloaded")

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
        self._forward_only = forward_only
        self._grain_nbytes = grain_nbytes
        self._products_nbytes = products_nbytes
        self._sum_buffer = sum_buffer
        self._progress = progress
        self._runs_on_cpu = any(param.device.type == "cpu" for param in model.parameters())
        self.multiplies = False
        """Whether the step multiplies matrices."""
        self._workspace_ops: set[str] = set()
        self._errors: dict[str, Exception] = {}
        """Of modes in which the model does not run."""

    def warnings(self) -> Iterator[str]:
        """Yield what the variants do not show."""
        if self._workspace_ops:
            names = ", ".join(sorted(self._workspace_ops))
            yield f"the workspace of {names} is not seen: the peak may be higher, up to the bytes after 'to'"
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
        pretended = self._layout.pretended() if self._layout is not None else contextlib.nullcontext()
        with eager, pretended as mesh, make_copies(self._model, self._optimizer, self._batch) as copies:
            host, held = FakeHost(), []
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
            )
            run_all = self._run_forward if self._forward_only else functools.partial(self._run_modes, host=host)
            found = list(run_all(copies, meter, fake=fake))
        self._workspace_ops = meter.workspace_ops
        self.multiplies = meter.multiplies
        return found

    def _run_forward(self, copies: Copies, meter: StepMeter, *, fake: bool) -> Iterator[StepVariant]:
        counts = self._counts()
        for index, parts in enumerate(counts):
            self._report(index, len(counts))
            held = meter.forward(self._first_two(copies[2], parts)[0], parts)
            yield self._variant(held, parts, "plain")

    def _run_modes(self, copies: Copies, meter: StepMeter, *, host: FakeHost, fake: bool) -> list[StepVariant]:
        has_blocks = bool(blocks_of(copies[0]))
        ways = ["plain"] * ("plain" in self._modes)
        ways += [mode for mode in ("selective", "checkpointed", "offloaded") if mode in self._modes and has_blocks]
        counts = self._runnable_counts(copies, meter)
        to_run = sorted({*counts[:2], counts[-1]})
        flops = meter.count_flops()
        found: list[StepVariant] = []
        for number, mode in enumerate(ways):
            if mode != "plain":
                saving = host.saving if mode == "offloaded" else None
                checkpoint_blocks(copies[0], selective=mode == "selective", saving=saving)
            held: dict[int, StepBytes] = {}
            try:
                for index, parts in enumerate(to_run):
                    self._report(number * len(to_run) + index, len(ways) * len(to_run))
                    held[parts] = self._step(copies, meter, parts, mode, fake=fake)
            except Exception as error:
                if mode == "plain" or not found:
                    raise
                self._errors[mode] = error
                continue
            for parts in counts:
                one = held[parts] if parts in held else self._between(held, parts)
                found.append(self._variant(one, parts, mode, flops))
        return found

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

    def _step(self, copies: Copies, meter: StepMeter, parts: int, mode: str, *, fake: bool) -> StepBytes:
        """Run a step in `parts` micro-batches, two of them at most: later ones are like the second."""
        micro_batches = self._first_two(copies[2], parts)
        accumulates = fake and meter.leaves_gradients_only and _are_alike(micro_batches)
        if accumulates:
            del micro_batches[0]
        held = meter.step(micro_batches, accumulates=accumulates, keeps_products=mode == "selective")
        return replace(held, offloaded=held.offloaded * parts // len(micro_batches))

    def _between(self, held: dict[int, StepBytes], parts: int) -> StepBytes:
        """Return what a step in `parts` micro-batches holds, from steps in fewer and in more of them.

        A whole batch tells nothing about smaller ones: while it runs there are no gradients yet to add to.
        """
        few, many = sorted(held)[-2:]
        least = self._micro_batch(many)
        return held[many].between(held[few], (self._micro_batch(parts) - least) / (self._micro_batch(few) - least))

    def _micro_batch(self, parts: int) -> int:
        return -(-self._count_samples(self._batch) // parts)

    def _variant(self, held: StepBytes, parts: int, mode: str, flops: Flops | None = None) -> StepVariant:
        extra = transfer = 0.0
        moved = 2 * held.offloaded  # there and back
        if flops is not None and flops.plain:
            extra = flops.recomputed / flops.plain if mode in ("checkpointed", "offloaded") else 0.0
            transfer = moved / _LINK_BYTES_PER_S / (flops.plain / _FLOPS_PER_S)
        extra += _RECOMPUTE_COST * (mode == "selective")
        return StepVariant(
            micro_batch=self._micro_batch(parts),
            parts=parts,
            checkpoint=mode != "plain",
            offload=mode == "offloaded",
            selective=mode == "selective",
            peak_nbytes=held.peak.nbytes,
            bound_nbytes=max(held.backward.bound, held.optimizer.bound),
            by_role=held.peak.roles,
            static_nbytes=held.static,
            backward_peak_nbytes=held.backward.nbytes,
            extra_flops=extra,
            moved_nbytes=moved,
            slowdown=1 + _PART_COST * (parts - 1) + extra + transfer,
        )

    def _first_alike(self, batch: Any, parts: int) -> list[Any]:
        """Return the first two micro-batches, or one if they are alike."""
        found = self._first_two(batch, parts)
        return found[:1] if _are_alike(found) else found

    def _first_two(self, batch: Any, parts: int) -> list[Any]:
        """Return the first two micro-batches at most: later ones are like the second."""
        return list(self._split(batch, parts))[:2] if parts > 1 else [batch]


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
