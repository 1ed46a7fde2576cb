"""Whether the observed steps train as they are meant to: in training mode, and by losses that get what they take."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch.nn import functional

from penstock.observe.doctor.probes.source_lines import line_text
from penstock.observe.doctor.probes.steps.layer_use import called_modules, numbers_of
from penstock.observe.doctor.step_results import StepCall

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
    {
        functional.mse_loss,
        functional.l1_loss,
        functional.smooth_l1_loss,
        functional.huber_loss,
        functional.poisson_nll_loss,
    }
)
"""Those of predictions and labels of one shape."""

_DIFFERENCES = frozenset({torch.Tensor.__sub__, torch.Tensor.__rsub__, torch.Tensor.sub, torch.sub, torch.subtract})


_MOVES = frozenset(
    (
        *("View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "ToCopy"),
        *("Squeeze", "Unsqueeze", "Select", "Slice", "Index", "Permute", "Transpose", "T"),
    )
)
"""What autograd calls operations that only move numbers."""


_COMPARED = 4
"""So many parameters of a module, the first and the last ones, have to change while it is trained."""


class _Module:
    """The innermost module with parameters around a layer that depends on the mode."""

    def __init__(self, own: list[torch.nn.Parameter]) -> None:
        self._before = [(weight, numbers_of(weight)) for weight in (*own[:_COMPARED], *own[-_COMPARED:])]
        self.modes: set[bool] = set()

    @property
    def is_trained(self) -> bool:
        """Whether its parameters have changed since."""
        return all(numbers_of(weight) != before for weight, before in self._before)


class TrainingChecks:
    """Looks at what torch's functions get in the observed steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._modules: dict[tuple[str, int], tuple[torch.nn.Module, _Module]] = {}
        self._probabilities: dict[tuple[_Line, str], set[int]] = {}
        self._broadcast: set[tuple[_Line, str]] = set()

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
            self._note_mode("batch norm" if func is functional.batch_norm else "dropout", func, (args, kwargs))
        if line is None or not args:
            return
        if func in _AS_LOGITS and _made_by(args[0]) == _AS_LOGITS[func]:
            self._probabilities.setdefault((line, func.__name__), set()).add(self._steps)
        is_loss = func in _LOSSES and _argument((args, kwargs), 4, "reduction", "mean") != "none"
        if is_loss or (func in _DIFFERENCES and _meets_labels(args, labels)):
            one, other = (*args, *kwargs.values())[:2]
            if _is_of_all_pairs(one, other):
                self._broadcast.add((line, f"{list(one.shape)} and {list(other.shape)}"))

    def _note_mode(self, kind: str, func: Any, given: _Arguments) -> None:
        """Note the mode of a layer, by the module that it belongs to."""
        module = _module_with_parameters()
        if module is None or (kind == "dropout" and not _argument(given, 1, "p", 0.5) > 0):
            return
        own = [weight for weight in module.parameters() if weight.requires_grad]
        _, seen = self._modules.setdefault((kind, id(module)), (module, _Module(own)))
        place, default = _MODES[func]
        seen.modes.add(bool(_argument(given, place, "training", default)))

    def evaluates(self) -> tuple[str, ...]:
        """Return "dropout" and "batch norm", where such layers of a module that is trained are in evaluation mode."""
        found = {kind for (kind, _), (_, seen) in self._modules.items() if seen.modes == {False} and seen.is_trained}
        return tuple(kind for kind in ("dropout", "batch norm") if kind in found)

    def probabilities(self) -> tuple[StepCall, ...]:
        """Return losses of logits that get probabilities, or probabilities in place of their logarithms."""
        return _calls(place for place, steps in self._probabilities.items() if len(steps) == self._steps)

    def broadcast(self) -> tuple[StepCall, ...]:
        """Return losses that compare every prediction with every label."""
        return _calls(self._broadcast)


def _module_with_parameters() -> torch.nn.Module | None:
    """Return the innermost module, of those that are called now, with parameters that may be trained."""
    return next((one for one in called_modules() if any(weight.requires_grad for weight in one.parameters())), None)


def _calls(places: Iterable[tuple[_Line, str]]) -> tuple[StepCall, ...]:
    return tuple(StepCall(what=what, line=line_text(*line), per_step=1) for line, what in places)


def _meets_labels(operands: tuple[Any, ...], labels: Container[int]) -> bool:
    """Return whether labels of the batch meet what gradients are computed of."""
    tensors = [one for one in operands if isinstance(one, torch.Tensor) and one.layout is torch.strided]
    return any(one.data_ptr() in labels for one in tensors) and any(one.requires_grad for one in tensors)


def _argument(given: _Arguments, place: int, name: str, default: Any) -> Any:
    args, kwargs = given
    return args[place] if len(args) > place else kwargs.get(name, default)


_AS_LOGITS: dict[Any, str] = {
    functional.cross_entropy: "Softmax",
    functional.nll_loss: "Softmax",
    functional.kl_div: "Softmax",
    functional.binary_cross_entropy_with_logits: "Sigmoid",
}
"""Losses of logits, or of logarithms of probabilities, and what must not come before them."""


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


def _is_of_all_pairs(one: Any, other: Any) -> bool:
    """Return whether tensors [n] and [n, 1] meet, of which none is a parameter: each of n numbers meets n."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    shorter, longer = sorted((tuple(one.shape), tuple(other.shape)), key=len)
    is_learned = any(tensor.is_leaf and tensor.requires_grad for tensor in (one, other))
    return len(shorter) == 1 and longer == (*shorter, 1) and shorter[0] > 1 and not is_learned
