"""CutCheck: whether a batch that is cut has the gradients of the whole batch, and if not, what probably couples it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.core.errors import OptionError
from penstock.core.host import available_nbytes
from penstock.device.oom import is_out_of_memory
from penstock.memory.microbatch.coupling import CouplingObserver, lowest_epsilon
from penstock.memory.microbatch.split import arrays_of
from penstock.memory.recovery.random_state import RandomState
from penstock.memory.recovery.saved_buffers import SavedBuffers
from penstock.memory.recovery.saved_gradients import SavedGradients
from penstock.memory.recovery.watched_state import WatchedState
from penstock.memory.step.micro_batch_runner import MicroBatchRunner

_NEGLIGIBLE = 1e-3
"""Gradients below this share of the largest one are compared as if they were that large: they are rounding errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutCheck:
    """The gradients of one batch, run whole and cut, compared; random numbers were replaced by their means.

    `str()` of it is a line for people.
    """

    samples: int
    """Samples in the batch."""

    parts: int
    """Parts that it was cut into."""

    differences: Mapping[str, float]
    """By parameter: the norm of the difference of its gradients, relative to that of the whole batch."""

    buffers: tuple[str, ...]
    """Buffers that ended with other values (running statistics), and parameters that are changed in place."""

    tolerance: float
    """The largest difference that rounding explains."""

    cause: str
    """The likely cause of a difference, with the line where it was seen; empty where there is none."""

    is_certain: bool
    """Whether random numbers cannot be the cause: those that could not be replaced are others for each part."""

    @property
    def parameter(self) -> str:
        """The parameter with the largest difference; empty where no parameter has a gradient."""
        return max(self.differences, key=lambda name: self.differences[name], default="")

    @property
    def largest(self) -> float:
        """The largest relative difference."""
        return max(self.differences.values(), default=0.0)

    @property
    def is_same(self) -> bool:
        """Whether cutting changes nothing but rounding."""
        return self.largest <= self.tolerance and not self.buffers

    def __str__(self) -> str:
        what = f"{self.samples} samples in {self.parts} parts"
        if self.is_same:
            return f"{what} have the gradients of the whole batch, to {self.largest:.1e}"
        found = f"{what} have other gradients: {self.largest:.2g} relative for {self.parameter}"
        if self.largest <= self.tolerance:
            found = f"{what} leave other values in {self.buffers[0]}"
        return f"{found}. Likely cause: {self.cause}"


@dataclass(frozen=True, slots=True)
class _Run:
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def _eager() -> contextlib.AbstractContextManager[object]:
    """Return a context in which compiled models run as written, so that their compiler does not see an observer."""
    if "torch._dynamo" not in sys.modules:  # which takes seconds to import
        return contextlib.nullcontext()
    eager: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


class CutChecker:
    """Compares gradients, and leaves gradients, buffers and random states as they were.

    Args:
        runner: computes losses and cuts batches.
        optimizer: whose parameters' gradients are compared too.
        loss_fn: what the losses depend on beside the model and what goes with it, if that is known.
        backward: computes the gradients of a loss.
    """

    def __init__(
        self,
        runner: MicroBatchRunner,
        optimizer: Optimizer | None,
        loss_fn: Callable[..., Any] | None,
        backward: Callable[[Tensor], object] = Tensor.backward,
    ) -> None:
        self._runner = runner
        self._backward = backward
        self._modules = runner.modules
        self._gradients = SavedGradients(self._modules, optimizer, with_stepped=True)
        self._buffers = SavedBuffers(*self._modules)
        self._watched = WatchedState(runner.model, loss_fn, (runner.model, *runner.cutting.also), is_watching=True)

    def check_if_affordable(self, batch: Any) -> CutCheck | None:
        """Do what `check` does, where the host has room for the gradients."""
        needed = sum(2 * 8 * param.numel() for param in self._named("named_parameters").values())
        return self.check(batch) if needed <= available_nbytes() // 4 else None

    def check(self, batch: Any, parts: int | None = None) -> CutCheck:
        """Run `batch` whole and cut; by default into parts of different sizes.

        Raises:
            OptionError: the batch has fewer than two samples, or cannot be cut.
        """
        size = self._runner.count_samples(batch)
        if size < 2:
            raise OptionError(f"a batch of {size} samples cannot be cut; check one with at least two")
        cut = self._runner.cut(batch, min(size, parts or _uneven_parts(size)))
        before = RandomState.now(self._runner.devices)
        self._gradients.looks_at_graph = True
        self._gradients.save()
        self._buffers.save()
        self._watched.save()
        versions = self._versions()
        observer = CouplingObserver(size, self._runner.devices, self._named("named_parameters").values())
        inputs = _SequenceFirst(self._modules, size)
        try:
            with inputs, _eager():
                whole = self._run([batch], observer)
            now = RandomState.now(self._runner.devices)
            is_certain = not observer.has_drawn and (now.numpy, now.python) == (before.numpy, before.python)
            changed = [name for name, version in self._versions().items() if versions.get(name) != version]
            self._watched.restore()
            before.restore()
            with _eager():
                parted = self._run_parts(cut, size)
        finally:
            self._restore(before)
        moved = [name for name, one in whole.buffers.items() if _is_other(one, parted.buffers.get(name))]
        cause = _cause(batch, size, observer.seen, inputs.found, changed, moved)
        if not is_certain:
            cause = f"random numbers are drawn that are others for each part; or {cause}"
        found = self._compare(whole, parted, size, len(cut), changed, cause, observer.dtypes)
        return dataclasses.replace(found, is_certain=is_certain)

    def _restore(self, before: RandomState) -> None:
        self._watched.restore()
        self._watched.free()
        self._gradients.restore()
        self._gradients.discard()
        self._buffers.restore()
        self._buffers.discard()
        before.restore()

    def _run(self, batches: Sequence[Any], observer: CouplingObserver) -> _Run:
        self._buffers.restore()
        for param in self._named("named_parameters").values():
            param.grad = None
        total = 0.0
        for batch in batches:
            with observer:
                loss, weight = self._runner.compute_loss(batch)
                if self._gradients.looks_at_graph:
                    self._gradients.find_in_graph(loss)
                observer.is_observing = False  # a backward adds up over samples in any case
                self._backward(loss)
                observer.is_observing = True
            total += float(weight)
        scale = 1 / total if total else 0.0
        gradients = {}
        for name, param in self._named("named_parameters").items():
            if param.grad is not None:
                gradients[name] = param.grad.detach().to_dense().to("cpu", torch.float64) * scale
                param.grad = None
        return _Run(gradients, {name: one.detach().clone() for name, one in self._named("named_buffers").items()})

    def _run_parts(self, cut: Sequence[Any], size: int) -> _Run:
        try:
            return self._run(cut, CouplingObserver(size, self._runner.devices))
        except Exception as error:
            if not is_out_of_memory(error):
                error.add_note(
                    f"the whole batch of {size} samples runs, and one of its {len(cut)} parts does not: pass split="
                )
            raise

    def _versions(self) -> dict[str, int]:
        return {name: param._version for name, param in self._named("named_parameters").items()}

    def _named(self, method: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number, module in enumerate(self._modules):
            prefix = f"also[{number - 1}]" if number else ""
            found.update(getattr(module, method)(prefix=prefix))
        return found

    def _compare(
        self, whole: _Run, cut: _Run, size: int, parts: int, changed: list[str], cause: str, dtypes: set[torch.dtype]
    ) -> CutCheck:
        names = [*whole.gradients, *(name for name in cut.gradients if name not in whole.gradients)]
        pairs = {name: _pair(whole.gradients.get(name), cut.gradients.get(name)) for name in names}
        least = _NEGLIGIBLE * max((float(one.norm()) for one, _ in pairs.values()), default=0.0)
        differences = {name: _relative(one, other, least) for name, (one, other) in pairs.items()}
        dtypes |= {param.dtype for param in self._named("named_parameters").values()}
        tolerance = min(0.15, 2 * math.sqrt(lowest_epsilon(dtypes)))
        buffers = tuple(
            name
            for name, one in whole.buffers.items()
            if name in cut.buffers and _differ(one, cut.buffers[name], tolerance)
        )
        is_same = not buffers and not changed and max(differences.values(), default=0.0) <= tolerance
        return CutCheck(
            samples=size,
            parts=parts,
            differences=differences,
            buffers=(*buffers, *changed),
            tolerance=tolerance,
            cause="" if is_same else cause,
            is_certain=True,
        )


class _SequenceFirst:
    """While it is on, finds a layer that takes (time, batch, ...) and is given the batch's first dimension as time."""

    def __init__(self, modules: Sequence[nn.Module], size: int) -> None:
        self._modules, self._size = modules, size
        self._hooks: list[Any] = []
        self.found = ""

    def __enter__(self) -> None:
        for module in self._modules:
            for name, layer in module.named_modules():
                if getattr(layer, "batch_first", None) is False:
                    self._hooks.append(layer.register_forward_pre_hook(self._look(name), with_kwargs=True))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _look(self, name: str) -> Any:
        def look(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            first = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
            if first is not None and first.ndim > 1 and first.shape[0] == self._size and not self.found:
                self.found = f"{type(layer).__name__} ({name!r})"

        return look


_CAUSES = {
    "pairs": "every sample meets every other ({size} x {size}), as in-batch negatives do, at {place}",
    "reduction": "a mean, a count or the like over all samples, as of a router or of batch statistics, at {place}",
    "statistic": "a number computed from all samples (their mean, say) is used for each of them, at {place}",
    "ratio": "a sum over all samples is divided by another one, at {place}; if that is a mean, let loss_fn return both",
    "mean": "loss_fn returns a mean, at {place}; let it return the sum of its losses, and their count",
    "exchange": "samples are taken out of their places and meet others, at {place}",
    "penalty": "a penalty on weights is added once for each part, at {place}; multiply it by what loss_fn counts",
}
"""By what was seen, the most telling first."""


def _cause(
    batch: Any, size: int, seen: Mapping[str, str], sequence_first: str, changed: list[str], buffers: list[str]
) -> str:
    """Return what probably makes gradients differ: the most telling thing that was seen."""
    if changed:
        return f"the parameter {changed[0]} is changed in place with each part; change it in after_step="
    if "batch norm" in seen:
        return f"batch norm computes statistics over the samples, at {seen['batch norm']}"
    if sequence_first:
        return f"{sequence_first} takes (time, batch, ...), so the first dimension is no batch; pass batch_dims=1"
    single = [tuple(one.shape) for one in arrays_of(batch) if one.ndim > 0 and one.shape[0] == 1]
    if single:
        return f"a tensor of shape {single[0]}, of one row, goes to every part; say so, or what else, with batch_dims="
    if buffers and not {"pairs", "reduction"} & set(seen):
        return f"forward changes the buffer {buffers[0]}, which later parts read"
    for kind, text in _CAUSES.items():
        if kind in seen:
            return text.format(place=seen[kind], size=size)
    return "samples are coupled, or their dimension is not the one that is cut; see batch_dims= and split="


def _pair(one: Tensor | None, other: Tensor | None) -> tuple[Tensor, Tensor]:
    present = one if one is not None else other
    assert present is not None
    zero = torch.zeros_like(present)
    return (zero if one is None else one), (zero if other is None else other)


def _relative(one: Tensor, other: Tensor, least: float) -> float:
    difference = float((one - other).norm())
    if not math.isfinite(difference):
        return math.inf
    return difference / max(float(one.norm()), least) if difference else 0.0


def _is_other(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and _differ(one, other, 0.0)


def _differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape:
        return True
    if not one.is_floating_point():
        return not torch.equal(one, other)
    return _relative(one.to("cpu", torch.float64), other.to("cpu", torch.float64), 1e-30) > tolerance


def _uneven_parts(size: int) -> int:
    """Return a small number of parts that are not all of the same size, where there is one.

    >>> [_uneven_parts(size) for size in (2, 3, 4, 6, 12)]
    [2, 2, 3, 4, 5]
    """
    return next((parts for parts in range(2, size) if size % parts), 2)
