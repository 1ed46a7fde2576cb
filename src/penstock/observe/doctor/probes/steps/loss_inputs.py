"""Losses of the observed steps that get something else than they take: probabilities, or labels of another shape.

Only those count of which gradients are computed: a step may log the same functions, as measures of what it predicts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch.nn import functional

from penstock.core.user_code import line_text
from penstock.observe.doctor.probes.steps.layer_modes import argument
from penstock.observe.doctor.step_results import StepCall

_Line = tuple[str, int]

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

_AS_LOGITS: dict[Any, str] = {
    functional.cross_entropy: "Softmax",
    functional.nll_loss: "Softmax",
    functional.kl_div: "Softmax",
    functional.binary_cross_entropy_with_logits: "Sigmoid",
}
"""Losses of logits, or of logarithms of probabilities, and what must not come before them."""

_MOVES = frozenset(
    (
        *("View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "ToCopy"),
        *("Squeeze", "Unsqueeze", "Select", "Slice", "Index", "Permute", "Transpose", "T"),
    )
)
"""What autograd calls operations that only move numbers."""

_MOST_NODES = 20_000
"""Of a graph; the losses are at its beginning."""


class LossInputs:
    """Looks at what losses get, and of which of them gradients are computed."""

    def __init__(self) -> None:
        self._steps = 0
        self._seen: dict[Any, tuple[str, _Line, str]] = {}
        """Losses of this step, by their nodes: what is wrong with each, its line, and what it is."""
        self._found: dict[tuple[str, _Line, str], set[int]] = {}

    def begin_step(self) -> None:
        """Count another step."""
        self._steps += 1

    def end_step(self) -> None:
        """Let go of the step's graph."""
        self._seen.clear()

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
        node = made.grad_fn if isinstance(made, torch.Tensor) else None
        if line is None or not args or node is None:
            return
        if func in _AS_LOGITS and _made_by(args[0]) == _AS_LOGITS[func]:
            self._seen[node] = "probabilities", line, func.__name__
        is_loss = func in _LOSSES and argument(args, kwargs, 4, "reduction", "mean") != "none"
        if is_loss or (func in _DIFFERENCES and _meets_labels(args, labels)):
            one, other = (*args, *kwargs.values())[:2]
            if _is_of_all_pairs(one, other) and (is_loss or not (_is_made_a_column(one) or _is_made_a_column(other))):
                self._seen[node] = "pairs", line, f"{list(one.shape)} and {list(other.shape)}"

    def note_backward(self, losses: Iterable[Any]) -> None:
        """Note that gradients of these are computed."""
        nodes = deque(one.grad_fn for one in losses if isinstance(one, torch.Tensor) and one.grad_fn is not None)
        reached = set(nodes)
        while nodes and self._seen and len(reached) < _MOST_NODES:
            node = nodes.popleft()
            if (found := self._seen.pop(node, None)) is not None:
                self._found.setdefault(found, set()).add(self._steps)
            following = {one for one, _ in node.next_functions if one is not None} - reached
            reached |= following
            nodes.extend(following)

    def probabilities(self) -> tuple[StepCall, ...]:
        """Return losses of logits that get probabilities, or probabilities in place of their logarithms."""
        return self._calls("probabilities", self._steps)

    def broadcast(self) -> tuple[StepCall, ...]:
        """Return losses that compare every prediction with every label."""
        return self._calls("pairs", 1)

    def _calls(self, kind: str, least: int) -> tuple[StepCall, ...]:
        return tuple(
            StepCall(what=what, line=line_text(*line), per_step=1)
            for (found, line, what), steps in self._found.items()
            if found == kind and len(steps) >= least
        )


def _meets_labels(operands: tuple[Any, ...], labels: Container[int]) -> bool:
    """Return whether labels of the batch meet what gradients are computed of."""
    tensors = [one for one in operands if isinstance(one, torch.Tensor) and one.layout is torch.strided]
    return any(one.data_ptr() in labels for one in tensors) and any(one.requires_grad for one in tensors)


def _made_by(values: Any) -> str:
    """Return which operation has computed a tensor, but for those that only move its numbers; empty if unknown.

    >>> _made_by(torch.ones(2, 3, requires_grad=True).softmax(1).T[0])
    'Softmax'
    """
    node = getattr(values, "grad_fn", None)
    while node is not None:
        name = _operation(node)
        if name not in _MOVES or not node.next_functions:
            return name
        node = node.next_functions[0][0]
    return ""


def _operation(node: Any) -> str:
    return str(node.name().rpartition("::")[2].rstrip("0123456789").removesuffix("Backward"))


def _is_of_all_pairs(one: Any, other: Any) -> bool:
    """Return whether tensors [n] and [n, 1] meet, of which none is a parameter: each of n numbers meets n."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    flat, column = sorted((one, other), key=lambda tensor: tensor.ndim)
    if flat.ndim != 1 or tuple(column.shape) != (*flat.shape, 1) or len(flat) < 2:
        return False
    return not any(tensor.is_leaf and tensor.requires_grad for tensor in (one, other))


def _is_made_a_column(column: torch.Tensor) -> bool:
    """Return whether this is a column because somebody gave numbers [n] a second dimension: to compare all pairs."""
    if column.ndim != 2:
        return False
    node = column.grad_fn
    is_unsqueezed = node is not None and _operation(node) == "Unsqueeze"
    return is_unsqueezed or (column._base is not None and column._base.ndim == 1)
