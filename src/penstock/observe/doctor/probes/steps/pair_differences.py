"""Distances of all pairs that a step makes of all their differences: [n, 1, d] - [m, d], squared and summed over d."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from penstock.observe.doctor.probes.source_lines import line_text
from penstock.observe.doctor.step_results import PairDifferences
from penstock.observe.doctor.thresholds import THRESHOLDS

_Line = tuple[str, int]

_DIFFERENCES = frozenset({torch.Tensor.__sub__, torch.Tensor.__rsub__, torch.Tensor.sub, torch.sub})
_NORMS = frozenset({torch.norm, torch.Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm})
_SUMS = frozenset({torch.sum, torch.Tensor.sum, torch.mean, torch.Tensor.mean})
_POWERS = frozenset(
    {torch.pow, torch.square, torch.abs, torch.Tensor.pow, torch.Tensor.__pow__, torch.Tensor.square}
    | {torch.Tensor.abs, torch.Tensor.__abs__}
)
_PRODUCTS = frozenset({torch.mul, torch.Tensor.mul, torch.Tensor.__mul__})


class DistancesOfPairs:
    """Finds the differences, by autograd's graph, in the observed steps.

    Differences that a step needs for something else than their squares, as the directions of forces, are left out, and
    so are sums of them with weights, or over points.
    """

    def __init__(self) -> None:
        self._made: dict[Any, tuple[_Line, str]] = {}
        """Differences of this step, by their nodes: their line, and their shapes."""
        self._powers: dict[Any, Any] = {}
        """Nodes of squares and the like, and those of their differences."""
        self._used: set[_Line] = set()
        """Lines of differences that are used otherwise."""
        self._found: dict[_Line, tuple[_Line, PairDifferences]] = {}

    def end_step(self) -> None:
        """Let go of the step's graph."""
        self._made.clear()
        self._powers.clear()

    def note(self, func: Callable[..., Any], args: tuple[Any, ...], made: Any, line: _Line | None) -> None:
        """Note a call of torch's, what it `made`, and its line."""
        if line is None or not isinstance(made, torch.Tensor) or made.grad_fn is None:
            return
        nodes = [one.grad_fn for one in args if isinstance(one, torch.Tensor)]
        if func in _DIFFERENCES and _is_of_pairs(args, made):
            shapes = " and ".join(str(list(one.shape)) for one in args)
            self._made[made.grad_fn] = line, f"{list(made.shape)} of {shapes}"
        elif self._made:
            self._follow(func, nodes, args, made, line)

    def _follow(
        self, func: Callable[..., Any], nodes: list[Any], args: tuple[Any, ...], made: Any, line: _Line
    ) -> None:
        differences = [node for node in nodes if node in self._made]
        is_product = func in _PRODUCTS and len(nodes) == 2 and nodes[0] is nodes[1]
        if differences and (func in _POWERS or is_product):
            self._powers[made.grad_fn] = differences[0]
        elif func in (_NORMS if differences else _SUMS) and nodes and _sums_last(args[0], made):
            node = differences[0] if differences else self._powers.get(nodes[0])
            if node is not None:
                first, shapes = self._made[node]
                lines = line_text(*first), line_text(*line)
                self._found[line] = first, PairDifferences(lines=tuple(dict.fromkeys(lines)), shapes=shapes)
        else:
            self._used.update(self._made[node][0] for node in differences)

    def result(self) -> tuple[PairDifferences, ...]:
        """Return what was found."""
        return tuple(found for first, found in self._found.values() if first not in self._used)


def _is_of_pairs(args: tuple[Any, ...], made: torch.Tensor) -> bool:
    """Return whether these are the differences of many points with many others, each of as many dimensions."""
    if made.ndim < 3 or len(args) != 2 or not all(isinstance(one, torch.Tensor) and one.ndim for one in args):
        return False
    is_large = made.numel() >= max(THRESHOLDS.pair_numbers, *(THRESHOLDS.pair_growth * one.numel() for one in args))
    return is_large and all(one.shape[-1] == made.shape[-1] for one in args)


def _sums_last(summed: torch.Tensor, made: torch.Tensor) -> bool:
    """Return whether a sum is one over the dimensions of each point."""
    return made.shape == summed.shape[:-1]
