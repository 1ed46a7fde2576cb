"""CutCheck: whether a batch that is cut has the gradients, or the outputs, of the whole batch.

Both are computed and compared. Random numbers are replaced by their means meanwhile (a dropout keeps everything), so
that two ways to compute the same loss can be compared.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from penstock.core.errors import OptionError
from penstock.core.host import available_nbytes
from penstock.memory.cutting.micro_batch import Cutting
from penstock.memory.recovery.random_state import RandomState
from penstock.memory.recovery.snapshot import Snapshot

_NEGLIGIBLE = 1e-3
"""Gradients below this share of the largest one are compared as if they were that large: they are rounding errors."""
_MEANS = {"normal_": 0.0, "uniform_": 0.5, "exponential_": 1.0, "rand": 0.5, "rand_like": 0.5, "randn": 0.0}
_MEANS |= {"randn_like": 0.0}
_REPLACED = frozenset((*_MEANS, "bernoulli", "bernoulli_", "native_dropout"))


@dataclass(frozen=True, kw_only=True, slots=True)
class CutCheck:
    """The gradients (or outputs) of one batch, run whole and cut, compared.

    `str()` of it is a line for people.
    """

    samples: int
    """Samples in the batch."""

    parts: int
    """Parts that it was cut into."""

    differences: Mapping[str, float]
    """By parameter: the norm of the difference of its gradients, relative to that of the whole batch."""

    buffers: tuple[str, ...]
    """Buffers that ended with other values (running statistics, not counters), and parameters changed in place."""

    tolerance: float
    """The largest difference that rounding explains."""

    is_certain: bool
    """Whether random numbers cannot be the cause: those that could not be replaced are others for each part."""

    compared: str = "gradients"

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
            return f"{what} have the {self.compared} of the whole batch, to {self.largest:.1e}"
        if self.largest <= self.tolerance:
            return f"{what} leave other values in {self.buffers[0]}"
        more = sum(one > self.tolerance for one in self.differences.values()) - 1
        others = f" and {more} more" if more else ""
        chance = "" if self.is_certain else " (or random numbers are others for each part)"
        return f"{what} have other {self.compared}: {self.largest:.2g} relative for {self.parameter}{others}{chance}"


class FixedChance(TorchDispatchMode):
    """Replaces random numbers by their means while it is on.

    Args:
        devices: accelerators that random numbers may be drawn on.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()
        """The types that were computed in, also under an autocast that is inside of the model."""
        self.has_drawn = False
        """Whether random numbers were drawn that are not replaced: permutations, say."""
        self._devices = devices

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        before = None
        if torch.Tag.nondeterministic_seeded in func.tags and name not in _REPLACED:
            before = RandomState.now(self._devices)
        result = func(*args, **kwargs)
        if name in _REPLACED:
            _set_to_mean(name, result, args, kwargs)
        if before is not None and before != RandomState.now(self._devices):
            self.has_drawn = True
        if isinstance(result, Tensor):
            self.dtypes.add(result.dtype)
        return result


def _set_to_mean(name: str, result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if name == "bernoulli_":
        chance = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        result.copy_(chance) if isinstance(chance, Tensor) else result.fill_(chance)
    elif name == "bernoulli":
        result.copy_(args[0])
    elif name == "native_dropout":
        result[0].copy_(args[0])
        result[1].fill_(True)
    else:
        result.fill_(_MEANS[name])


class Comparison(Protocol):
    """Compares what a step does with a batch that is whole and that is cut. `CutPolicy` calls both methods."""

    def is_due(self, batch: Any, parts: Sequence[Any]) -> bool:
        """Return whether cuts like this one have not been compared yet."""
        ...

    def compare(self, piece: Any) -> CutCheck | str:
        """Compare a part of a batch, which has two samples at least; or return why that is not possible.

        All is as before afterwards. It may run out of memory.
        """
        ...


def _eager() -> contextlib.AbstractContextManager[object]:
    """Return a context in which compiled models run as written, so that their compiler does not see a mode."""
    if "torch._dynamo" not in sys.modules:  # which takes seconds to import
        return contextlib.nullcontext()
    eager: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


class CutComparison:
    """Compares what a step computes of a batch that is whole and that is cut.

    Args:
        cutting: how batches are cut.
        snapshot: of all that the step changes.
        compute: `parts -> results`, by name.
        compared: what these are: "gradients" or "outputs".
    """

    def __init__(
        self,
        cutting: Cutting,
        snapshot: Snapshot,
        compute: Callable[[Sequence[Any]], Mapping[str, Tensor]],
        compared: str,
    ) -> None:
        self._cutting, self._snapshot, self._compute, self._compared = cutting, snapshot, compute, compared
        self._is_done = False

    def is_due(self, batch: Any, parts: Sequence[Any]) -> bool:
        """Return whether none has been compared."""
        return not self._is_done

    def compare(self, piece: Any) -> CutCheck | str:
        """Compare, if the host has room for the gradients."""
        needed = sum(2 * param.nbytes for param in self._snapshot.named("named_parameters").values())
        if self._compared == "gradients" and needed > available_nbytes() // 2:
            return "the host has no room for a copy of the gradients"
        found = self.check(piece)
        self._is_done = True
        return found

    def check(self, batch: Any, parts: int | None = None) -> CutCheck:
        """Run `batch` whole and cut; by default into parts of different sizes. All is as before afterwards.

        Raises:
            OptionError: the batch has fewer than two samples, or cannot be cut.
        """
        size = self._cutting.count(batch)
        if size < 2:
            raise OptionError(f"a batch of {size} samples cannot be cut; check one with at least two")
        cut = self._cutting.cut(batch, min(size, parts or _uneven_parts(size)))
        chance = FixedChance(self._snapshot.devices)
        named = self._snapshot.named
        self._snapshot.save()
        try:
            with _eager():
                params = named("named_parameters")
                versions = [one._version for one in params.values()]
                whole, is_certain = self._run(chance, [batch])
                changed = [name for name, was in zip(params, versions, strict=True) if params[name]._version != was]
                buffers = {name: one.detach().clone() for name, one in named("named_buffers").items()}
                parted, is_still_certain = self._run(chance, cut)
                tolerance = _tolerance(chance.dtypes, (*params.values(), *whole.values()))
                moved = [
                    name
                    for name, one in named("named_buffers").items()
                    if name in buffers and one.is_floating_point() and _differ(buffers[name], one, tolerance)
                ]
                differences = _differences(whole, parted)
        finally:
            self._snapshot.restore()
            self._snapshot.free()
        return CutCheck(
            samples=size,
            parts=len(cut),
            differences=differences,
            buffers=(*moved, *changed),
            tolerance=tolerance,
            is_certain=is_certain and is_still_certain,
            compared=self._compared,
        )

    def _run(self, chance: FixedChance, parts: Sequence[Any]) -> tuple[dict[str, Tensor], bool]:
        """Begin from where the first run began, with random numbers replaced; return whether all of them were."""
        self._snapshot.restore()
        before = RandomState.now(self._snapshot.devices)
        with chance:
            found = dict(self._compute(parts))
        drawn = RandomState.now(self._snapshot.devices)
        return found, not chance.has_drawn and (drawn.numpy, drawn.python) == (before.numpy, before.python)


def gradient_comparison(
    cutting: Cutting,
    snapshot: Snapshot,
    compute_loss: Callable[[Any], tuple[Tensor, Any]],
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> CutComparison:
    """Return what compares the gradients of a snapshot's modules, divided by what their losses weigh.

    Args:
        cutting: how batches are cut.
        snapshot: of all that a loss changes.
        compute_loss: `part -> (sum of losses, how many they are)`.
        backward: computes the gradients of a loss.
    """

    def compute(parts: Sequence[Any]) -> dict[str, Tensor]:
        params, total = snapshot.named("named_parameters"), 0.0
        for param in params.values():
            param.grad = None
        for part in parts:
            loss, weight = compute_loss(part)
            snapshot.find_in_graph(loss)
            backward(loss)
            total += float(weight)
        return {
            name: (param.grad.detach().to_dense() / (total or math.inf)).to("cpu")
            for name, param in params.items()
            if param.grad is not None
        }

    return CutComparison(cutting, snapshot, compute, "gradients")


def output_comparison(
    cutting: Cutting,
    snapshot: Snapshot,
    forward: Callable[[Any], Any],
    join: Callable[[Sequence[Any], Sequence[int]], Any],
) -> CutComparison:
    """Return what compares outputs.

    Args:
        cutting: how batches are cut.
        snapshot: of all that a forward changes.
        forward: `part -> output`.
        join: `(outputs, sizes) -> output`.
    """

    def compute(parts: Sequence[Any]) -> dict[str, Tensor]:
        outputs = [*map(forward, parts)]
        return _named_leaves(join(outputs, [*map(cutting.count, parts)]) if outputs[1:] else outputs[0])

    return CutComparison(cutting, snapshot, compute, "outputs")


def _named_leaves(output: Any) -> dict[str, Tensor]:
    leaves, _ = tree_flatten_with_path(output)
    found: dict[str, Tensor] = {}
    for path, leaf in leaves:
        for number, one in enumerate(_tensors_in(leaf)):
            found[f"the output{''.join(map(str, path))}{f'[{number}]' if number else ''}"] = one.detach()
    return found


def _tensors_in(leaf: Any) -> list[Tensor]:
    """Return the tensors of a leaf: itself, or those of an output of Hugging Face's, which is a mapping."""
    if isinstance(leaf, Mapping):
        return [one for one in tree_leaves({**leaf}) if isinstance(one, Tensor)]
    return [leaf] if isinstance(leaf, Tensor) else []


def _differences(whole: Mapping[str, Tensor], parted: Mapping[str, Tensor]) -> dict[str, float]:
    norms = {name: float(one.to("cpu", torch.float64).norm()) for name, one in whole.items()}
    least = _NEGLIGIBLE * max(norms.values(), default=0.0)
    return {name: _relative(whole.get(name), parted.get(name), least) for name in {**whole, **parted}}


def _relative(one: Tensor | None, other: Tensor | None, least: float) -> float:
    if one is not None and other is not None and one.shape != other.shape:
        return math.inf
    first, second = (torch.zeros(()) if each is None else each.to("cpu", torch.float64) for each in (one, other))
    is_equal = (first == second) | (first.isnan() & second.isnan())  # infinite, where something is masked
    difference = float((first - second).masked_fill(is_equal, 0.0).norm())
    if not math.isfinite(difference):
        return math.inf
    return difference / max(float(first.norm()), least, 1e-300) if difference else 0.0


def _differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return _relative(one, other, 1e-30) > tolerance


def _tolerance(dtypes: set[torch.dtype], tensors: Iterable[Tensor]) -> float:
    """Return what the rounding of the coarsest of some types may change."""
    every = dtypes | {one.dtype for one in tensors}
    epsilon = max((torch.finfo(dtype).eps for dtype in every if dtype.is_floating_point), default=2.0**-23)
    return min(0.15, 2 * math.sqrt(epsilon))


def _uneven_parts(size: int) -> int:
    """Return a small number of parts that are not all of the same size, where there is one.

    >>> [_uneven_parts(size) for size in (2, 3, 4, 6, 12)]
    [2, 2, 3, 4, 5]
    """
    return next((parts for parts in range(2, size) if size % parts), 2)
