"""How a step uses its layers: one of them many times in a row, in float64, or a few rows of a large embedding."""

from __future__ import annotations

import gc
import statistics
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from penstock.observe.doctor.probes.source_lines import line_text
from penstock.observe.doctor.step_results import StepCall
from penstock.observe.doctor.thresholds import THRESHOLDS

PRODUCTS = frozenset(
    {
        torch.nn.functional.linear,
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
    }
)
"""Functions that multiply by the weights of layers."""

ACCUMULATE = (torch.Tensor.backward, torch.autograd.backward)
"""Functions that add to the gradients of parameters."""

_CALL = torch.nn.Module._call_impl.__code__

_Line = tuple[str, int]

_COMPARED = 1024
"""Numbers of each parameter."""


class _Columns(NamedTuple):
    """Those of a batch of sequences."""

    shared: int
    """How many of the last ones have one and the same value."""
    columns: int
    value: int


class LayerUse:
    """Counts what the observed steps do with parameters."""

    def __init__(self) -> None:
        self.computes_in_double = False
        """Whether a product was one of float64 tensors."""
        self._steps = 0
        self._passes = 0
        """How often gradients were computed: calls on both sides of that cannot be one."""
        self._times: dict[tuple[_Line, int], list[float]] = {}
        self._in_pass: Counter[tuple[_Line, int, int]] = Counter()
        self._weights: dict[int, torch.Tensor] = {}  # kept, so that no other has the id of one
        self._before: dict[int, object] = {}
        self._modules: dict[int, list[torch.nn.Module]] = {}
        """Those that were called when a parameter was used first, innermost first."""
        self._have_gradients: set[int] = set()
        self._optimized: set[int] = set()
        self._has_looked = False
        self.optimized: tuple[int, int] = (0, 0)
        """How many tensors the largest optimizer has, and how many numbers they have together."""
        self._used_whole: set[int] = set()
        self._embedded: dict[int, tuple[_Line, int]] = {}
        self._columns: dict[_Line, list[_Columns]] = {}
        self._again: Counter[_Line] = Counter()

    def begin_step(self) -> None:
        """Count another step."""
        self._steps += 1

    def note(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any, line: _Line | None, seconds: float
    ) -> None:
        """Note a call of torch's outside of an optimizer, what it `made`, its line, and how long it took."""
        if func in (*ACCUMULATE, torch.autograd.grad):
            self._passes += 1
            self._note_gradients()
            if func in ACCUMULATE and kwargs.get("retain_graph") and line is not None:
                self._again[line] += 1
            return
        if func is torch.nn.functional.embedding and len(args) > 1:
            indices, weight = args[:2]
            if line is not None and indices.ndim == 2 and indices.numel():
                self._columns.setdefault(line, []).append(_columns(indices))
            if line is not None and _is_trained(weight) and not (kwargs.get("sparse") or any(args[6:7])):
                self._note_weight(weight)
                _, before = self._embedded.get(id(weight), (line, 0))
                self._embedded[id(weight)] = line, max(before, indices.numel())
            return
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        weights = list(filter(_is_trained, (one if one._base is None else one._base for one in tensors)))
        if any(isinstance(one, torch.Tensor) and one.requires_grad for one in tree_leaves(made)):
            self._used_whole.update(map(id, weights))
        if func not in PRODUCTS:
            return
        self.computes_in_double |= any(one.dtype is torch.float64 for one in tensors)
        for weight in weights:
            self._note_weight(weight)
            if line is not None:
                self._times.setdefault((line, id(weight)), []).append(seconds)
                self._in_pass[line, id(weight), self._passes] += 1

    def end_step(self) -> None:
        """Note which parameters have gradients at the end of a step, and which optimizers there are."""
        self._note_gradients()
        self._passes += 1
        if not self._has_looked and not self._weights.keys() <= self._optimized:
            self._has_looked = True  # once: there may be millions of objects
            for one in gc.get_objects():  # an optimizer may wait for many batches, or for another epoch
                if issubclass(type(one), torch.optim.Optimizer) and self._updates(one):
                    self.note_optimizer(one)

    def _updates(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(weight) in self._weights for group in optimizer.param_groups for weight in group["params"])

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the parameters that an optimizer has."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._optimized.update(map(id, weights))
        self.optimized = max(self.optimized, (len(weights), sum(weight.numel() for weight in weights)))

    def _note_gradients(self) -> None:
        self._have_gradients |= {key for key, weight in self._weights.items() if weight.grad is not None}

    def is_parameter(self, one: Any) -> bool:
        """Return whether a tensor is one of these parameters, or shares its values, as `.data` does."""
        if not isinstance(one, torch.Tensor) or not self._weights:
            return False
        pointers = {weight.data_ptr() for weight in self._weights.values()}
        return isinstance(one, torch.nn.Parameter) or one.data_ptr() in pointers

    @property
    def weights(self) -> Collection[torch.Tensor]:
        """The parameters that layers multiplied by so far."""
        return self._weights.values()

    @property
    def double_parameters(self) -> int:
        """How many numbers the float64 ones have."""
        return sum(weight.numel() for weight in self._weights.values() if weight.dtype is torch.float64)

    @property
    def parameters(self) -> int:
        """How many numbers all of these parameters have."""
        return sum(weight.numel() for weight in self._weights.values())

    def untrained(self) -> int:
        """Return how many of them got gradients and are as they were, if others are not."""
        return sum(weight.numel() for weight in self._untrained())

    def never_trained(self) -> int:
        """Return how many of these no optimizer has, if optimizers have all that have changed.

        Others are perhaps trained in turns, and wait for theirs.
        """
        untrained = self._untrained()
        waiting = {id(weight) for weight in untrained}
        changed = {key for key in self._have_gradients - waiting if self._before[key] != _state_of(self._weights[key])}
        if not changed <= self._optimized:
            return 0
        return sum(weight.numel() for weight in untrained if id(weight) not in self._optimized)

    def left_out(self) -> tuple[str, ...]:
        """Return the shapes of those that are untrained, in training mode and in a model of which others are optimized.

        A model that only judges another one has no parameters in its optimizer, or is in evaluation mode.
        """
        found = [
            weight for weight in self._untrained() if id(weight) not in self._optimized and self._is_in_model(weight)
        ]
        return tuple(str(list(weight.shape)) for weight in found)

    def _is_in_model(self, weight: torch.Tensor) -> bool:
        modules = self._modules.get(id(weight), [])
        is_optimized = any(id(one) in self._optimized for module in modules[1:] for one in module.parameters())
        return is_optimized and modules[0].training

    def _untrained(self) -> list[torch.Tensor]:
        known = {key for key, state in self._before.items() if state is not None}
        same = {key for key in known if _state_of(self._weights[key]) == self._before[key]}
        if known == same:
            return []
        return [weight for key, weight in self._weights.items() if key in same & self._have_gradients]

    def _note_weight(self, weight: torch.Tensor) -> None:
        if id(weight) not in self._weights:
            self._weights[id(weight)], self._before[id(weight)] = weight, _state_of(weight)
            self._modules[id(weight)] = list(called_modules())

    def repeated(self) -> tuple[StepCall, ...]:
        """Return the lines that apply one layer many times in each step, to little at a time."""
        found: dict[_Line, float] = {}
        typical_s = {
            of: statistics.median(seconds) for of, seconds in self._times.items()
        }  # on a busy machine one waits
        total_s = sum(typical_s[of] * len(seconds) for of, seconds in self._times.items())
        for (line, key, _), count in self._in_pass.items():
            is_short = typical_s[line, key] < THRESHOLDS.small_call_s
            if count >= THRESHOLDS.repeated_calls and is_short:
                found[line] = max(found.get(line, 0.0), count)
        own_s = sum(typical_s[of] * len(seconds) for of, seconds in self._times.items() if of[0] in found)
        if own_s < THRESHOLDS.line_fraction * total_s:
            return ()
        return tuple(StepCall(what="", line=line_text(*line), per_step=count) for line, count in found.items())

    def padded(self) -> tuple[StepCall, ...]:
        """Return lookups whose last columns mostly have one value in all rows, the same in all batches, and how many.

        `per_step` is their fraction. A batch may have a sequence that is as long as it can be.
        """
        found: list[StepCall] = []
        for line, seen in self._columns.items():
            shared, columns = sum(one.shared for one in seen), sum(one.columns for one in seen)
            values = {one.value for one in seen if one.shared}
            if len(values) == 1 and shared >= THRESHOLDS.padded_columns * len(seen):
                what = f"{shared / len(seen):.0f} of {columns / len(seen):.0f} columns"
                found.append(StepCall(what=what, line=line_text(*line), per_step=shared / columns))
        return tuple(found)

    def backward_again(self) -> tuple[StepCall, ...]:
        """Return lines that compute gradients of a graph and keep it, more than once in a step."""
        return tuple(
            StepCall(what="", line=line_text(*line), per_step=count / self._steps)
            for line, count in self._again.items()
            if count > self._steps
        )

    def dense_embeddings(self) -> tuple[StepCall, ...]:
        """Return embeddings that are most of the parameters, and of which a step uses few rows; `per_step` of them."""
        rare = {
            key: (line, rows)
            for key, (line, rows) in self._embedded.items()
            if key not in self._used_whole and self._weights[key].shape[0] >= THRESHOLDS.unused_rows * rows
        }
        own = sum(self._weights[key].numel() for key in rare)
        if own < THRESHOLDS.embedding_parameters or own < THRESHOLDS.embedding_fraction * self.parameters:
            return ()
        return tuple(
            StepCall(what=f"{self._weights[key].shape[0]} rows", line=line_text(*line), per_step=rows)
            for key, (line, rows) in rare.items()
        )


def _columns(indices: torch.Tensor) -> _Columns:
    others = (indices != indices[:1, -1:]).any(0).nonzero()
    shared = int(indices.shape[1] - (others.max() + 1 if len(others) else 0))
    return _Columns(shared, indices.shape[1], int(indices[0, -1]))


def _state_of(weight: torch.Tensor) -> object:
    """Return what changes when a parameter is updated, in place or through `.data`."""
    try:
        return weight._version, numbers_of(weight)
    except Exception:  # a tensor of torch.func, of several devices, without values or a version
        return None


def called_modules() -> Iterator[torch.nn.Module]:
    """Yield the modules that are called now, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


def numbers_of(tensor: torch.Tensor | None) -> bytes:
    """Return some of a tensor's numbers, at most 2048 over all of it; empty without a tensor."""
    if tensor is None:
        return b""
    whole = tensor.detach()
    whole = torch.view_as_real(whole) if whole.is_complex() else whole
    some = whole.reshape(-1)[:: max(1, whole.numel() // _COMPARED)]
    # NumPy gets a copy: a storage that it has seen cannot be resized any longer.
    return some.to("cpu", torch.float64, copy=True).numpy().tobytes()


def _is_trained(one: Any) -> bool:
    return isinstance(one, torch.nn.Parameter) and one.requires_grad
