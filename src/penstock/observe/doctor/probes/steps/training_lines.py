"""Which lines of a step contribute to its gradients.

A line does if it computes a tensor that requires gradients, or one of which such a tensor is computed later in the
step: a teacher's outputs do, a histogram of the gradients does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from penstock.observe.doctor.probes.source_lines import line_text

_Line = tuple[str, int]


class TrainingLines:
    """Follows the tensors of one step at a time."""

    def __init__(self) -> None:
        self._training: set[_Line] = set()
        self._made: dict[int, tuple[Any, frozenset[_Line]]] = {}

    def begin_step(self) -> None:
        """Forget the tensors of the step before."""
        self._made.clear()

    def note(self, line: _Line, operands: Iterable[Any], made: Any) -> None:
        """Note that a line computed `made` of `operands`."""
        lines = frozenset({line}).union(
            *(self._made[id(one)][1] for one in tree_leaves(operands) if id(one) in self._made)
        )
        tensors = [one for one in tree_leaves(made) if isinstance(one, torch.Tensor)]
        if any(one.requires_grad for one in tensors):
            self._training |= lines
        else:
            self._made.update({id(one): (one, lines) for one in tensors})

    def note_training(self, line: _Line) -> None:
        """Note a line that computes gradients."""
        self._training.add(line)

    def texts(self) -> tuple[str, ...]:
        """Return the lines that contribute."""
        return tuple(sorted(line_text(*line) for line in self._training))
