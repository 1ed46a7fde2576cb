"""Whether the observed steps train as they are meant to: in training mode, with gradients of one batch, from logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch.nn import functional

from penstock.observe.doctor.probe_results import StepCall
from penstock.observe.doctor.probes.source_lines import line_text
from penstock.observe.doctor.probes.steps.layer_use import numbers_of
from penstock.observe.doctor.thresholds import THRESHOLDS

_Line = tuple[str, int]
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_MODES = {
    functional.dropout: (2, True),
    functional.alpha_dropout: (2, False),
    functional.feature_alpha_dropout: (2, False),
    functional.dropout1d: (2, True),
    functional.dropout2d: (2, True),
    functional.dropout3d: (2, True),
    functional.batch_norm: (5, False),
}
"""Functions that depend on the mode of their layer: where `training` stands, and what it is if it is left out."""

_LOSSES = frozenset(
    {functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss},
)
"""Those of predictions and labels of one shape."""

_DIFFERENCES = frozenset({torch.Tensor.__sub__, torch.Tensor.__rsub__, torch.Tensor.sub, torch.sub})


_MOVES = frozenset(
    (
        *("View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "ToCopy"),
        *("Squeeze", "Unsqueeze", "Select", "Slice", "Index", "Permute", "Transpose", "T"),
    )
)
"""What autograd calls operations that only move numbers."""


class TrainingChecks:
    """Looks at what torch's functions get in the observed steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._modes: dict[str, set[bool]] = {"dropout": set(), "batch norm": set()}
        self._probabilities: dict[tuple[_Line, str], set[int]] = {}
        self._broadcast: set[tuple[_Line, str]] = set()
        self._kept: dict[_Line, set[int]] = {}
        self._got_at: dict[int, bytes] = {}
        """The values that parameters had when they got gradients last."""
        self._before: dict[int, bytes] = {}
        self._stale: set[int] = set()
        self._mixed: dict[int, _Line] = {}
        """Parameters of which gradients that were applied already were added to others, and the line that did so."""

    def begin_step(self) -> None:
        """Count another step."""
        self._steps += 1

    def note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Any,
        line: _Line | None,
        labels: Container[int],
    ) -> None:
        """Note a call of torch's outside of an optimizer, what it `made`, and where the batch's labels lie."""
        if func in _MODES and isinstance(made, torch.Tensor) and made.requires_grad:
            self._note_mode(func, (args, kwargs))
        if line is None or not args:
            return
        if func in _AS_LOGITS and _AS_LOGITS[func](args[0]):
            self._probabilities.setdefault((line, func.__name__), set()).add(self._steps)
        if func in _LOSSES or (func in _DIFFERENCES and _is_loss(args, labels)):
            one, other = (*args, *kwargs.values())[:2]
            if _is_broadcast(one, other):
                self._broadcast.add((line, f"{list(one.shape)} and {list(other.shape)}"))

    def _note_mode(self, func: Any, given: _Arguments) -> None:
        place, default = _MODES[func]
        if func is functional.batch_norm:
            self._modes["batch norm"].add(_argument(given, place, "training", default))
        elif _argument(given, 1, "p", 0.5) > 0:
            self._modes["dropout"].add(_argument(given, place, "training", default))

    def before_gradients(self, weights: Iterable[torch.Tensor]) -> None:
        """Note the gradients of parameters before others are computed, and which of these were applied already."""
        self._note_applied(weights)
        self._before, self._stale = {}, set()
        for weight in weights:
            self._before[id(weight)] = numbers_of(weight.grad)
            got_at = self._got_at.get(id(weight))
            if got_at and got_at != numbers_of(weight) and _has_gradient(weight):
                self._stale.add(id(weight))

    def after_gradients(self, weights: Iterable[torch.Tensor], line: _Line | None) -> None:
        """Note to which parameters gradients were added, and to which of those that were applied already."""
        for weight in weights:
            if self._before.get(id(weight)) != numbers_of(weight.grad):
                self._got_at[id(weight)] = numbers_of(weight)
                if id(weight) in self._stale and line is not None:
                    self._mixed[id(weight)] = line

    def end_step(self, weights: Iterable[torch.Tensor]) -> None:
        """Note what was applied at the end of a step."""
        self._note_applied(weights)

    def _note_applied(self, weights: Iterable[torch.Tensor]) -> None:
        """Note which parameters were updated with gradients of earlier updates, too, and forget what was cleared."""
        for weight in weights:
            line = self._mixed.get(id(weight))
            if line is not None and numbers_of(weight) != self._got_at[id(weight)]:
                self._kept.setdefault(line, set()).add(self._steps)
            if line is not None and (line in self._kept or not _has_gradient(weight)):
                del self._mixed[id(weight)]

    @property
    def evaluates(self) -> tuple[str, ...]:
        """Layers that are trained, and all in evaluation mode; those that keep statistics last."""
        return tuple(name for name, modes in self._modes.items() if modes == {False})

    @property
    def trains_layers(self) -> bool:
        """Whether one that depends on the mode is in training mode."""
        return any(True in modes for modes in self._modes.values())

    def kept_gradients(self) -> tuple[StepCall, ...]:
        """Return lines that add gradients to those which were applied already; the first step has none."""
        return _calls((line, "") for line, steps in self._kept.items() if len(steps) >= max(2, self._steps - 1))

    def probabilities(self) -> tuple[StepCall, ...]:
        """Return losses of logits that get probabilities, or probabilities in place of their logarithms."""
        return _calls(place for place, steps in self._probabilities.items() if len(steps) == self._steps)

    def broadcast(self) -> tuple[StepCall, ...]:
        """Return losses that compare every prediction with every label."""
        return _calls(self._broadcast)


def _has_gradient(weight: torch.Tensor) -> bool:
    return weight.grad is not None and bool(weight.grad.any())


def _calls(places: Iterable[tuple[_Line, str]]) -> tuple[StepCall, ...]:
    return tuple(StepCall(what=what, line=line_text(*line), per_step=1) for line, what in places)


def _is_loss(operands: tuple[Any, ...], labels: Container[int]) -> bool:
    """Return whether labels of the batch meet what gradients are computed of."""
    tensors = [one for one in operands if isinstance(one, torch.Tensor) and one.layout is torch.strided]
    return any(one.data_ptr() in labels for one in tensors) and any(one.requires_grad for one in tensors)


def _argument(given: _Arguments, place: int, name: str, default: Any) -> Any:
    args, kwargs = given
    return args[place] if len(args) > place else kwargs.get(name, default)


def _passes_softmax(values: Any) -> bool:
    return _made_by(values) == "Softmax"


def _passes_sigmoid(values: Any) -> bool:
    return _made_by(values) == "Sigmoid"


def _are_no_logarithms(values: Any) -> bool:
    return _made_by(values) == "Softmax" or float(values.detach().max()) > THRESHOLDS.logarithm_error


_AS_LOGITS: dict[Any, Callable[[Any], bool]] = {
    functional.cross_entropy: _passes_softmax,
    functional.binary_cross_entropy_with_logits: _passes_sigmoid,
    functional.nll_loss: _are_no_logarithms,
}
"""Losses, and what is wrong for them."""


def _made_by(values: Any) -> str:
    """Return which operation has computed a tensor, but for those that only move its numbers; empty if unknown.

    >>> _made_by(torch.ones(2, 3, requires_grad=True).softmax(1).T[0])
    'Softmax'
    """
    node = getattr(values, "grad_fn", None)
    while node is not None:
        name = node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")
        if name not in _MOVES or not node.next_functions:
            return str(name)
        node = node.next_functions[0][0]
    return ""


def _is_broadcast(one: Any, other: Any) -> bool:
    """Return whether each number of one tensor meets several of the other, and the other way round: [n, 1] and [n]."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    whole = math.prod(torch.broadcast_shapes(one.shape, other.shape))
    return bool(whole > max(one.numel(), other.numel()))
