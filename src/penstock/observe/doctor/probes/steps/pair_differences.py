"""Distances of all pairs that a step makes of all their differences: [n, 1, d] - [m, d], squared and summed over d."""

from __future__ import annotations

from typing import Any

import torch

from penstock.observe.doctor.probes.source_lines import line_text
from penstock.observe.doctor.step_results import PairDifferences
from penstock.observe.doctor.thresholds import THRESHOLDS

_Line = tuple[str, int]

_DIFFERENCES = frozenset({torch.Tensor.__sub__, torch.Tensor.__rsub__, torch.Tensor.sub, torch.sub})
_SUMS = frozenset(
    {torch.sum, torch.Tensor.sum, torch.mean, torch.Tensor.mean, torch.norm, torch.Tensor.norm, torch.linalg.norm}
    | {torch.linalg.vector_norm}
)
_BETWEEN = frozenset({"Pow", "Mul", "Abs"})
"""What autograd calls that which is done with each difference before they are summed."""


class DistancesOfPairs:
    """Finds the differences, by autograd's graph, in the observed steps."""

    def __init__(self) -> None:
        self._made: dict[Any, tuple[_Line, str]] = {}
        self._found: dict[_Line, PairDifferences] = {}

    def end_step(self) -> None:
        """Let go of the step's graph."""
        self._made.clear()

    def note(self, func: Any, args: tuple[Any, ...], made: Any, line: _Line | None) -> None:
        """Note a call of torch's, what it `made`, and its line."""
        if line is None or not isinstance(made, torch.Tensor) or made.grad_fn is None:
            return
        if func in _DIFFERENCES:
            sizes = [one.numel() for one in args if isinstance(one, torch.Tensor)]
            if made.ndim >= 3 and made.numel() >= max(THRESHOLDS.pair_numbers, THRESHOLDS.pair_growth * max(sizes)):
                shapes = " and ".join(str(list(one.shape)) for one in args if isinstance(one, torch.Tensor))
                self._made[made.grad_fn] = line, f"{list(made.shape)} of {shapes}"
        elif func in _SUMS and args and self._made and made.ndim == args[0].ndim - 1:
            node = args[0].grad_fn
            while node is not None and node not in self._made:
                name = node.name().rstrip("0123456789").removesuffix("Backward")
                node = node.next_functions[0][0] if name in _BETWEEN else None
            if node is not None:
                first, shapes = self._made[node]
                lines = line_text(*first), line_text(*line)
                self._found[line] = PairDifferences(lines=tuple(dict.fromkeys(lines)), shapes=shapes)

    def result(self) -> tuple[PairDifferences, ...]:
        """Return what was found."""
        return tuple(self._found.values())
