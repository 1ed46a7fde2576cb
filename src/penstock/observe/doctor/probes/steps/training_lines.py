"""Which lines of a step contribute to its gradients.

A line does if it computes a tensor that requires gradients, or one of which such a tensor is computed later in the
step: a teacher's outputs do, a histogram of the gradients does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from penstock.observe.doctor.probes.source_lines import line_text

_Line = tuple[str, int]


class _Made(NamedTuple):
    tensor: Any
    lines: frozenset[_Line]
    """The lines that contribute to it."""
    is_from_python: bool
    """Whether values of Python's or NumPy's do."""


class TrainingLines:
    """Follows the tensors of one step at a time."""

    def __init__(self) -> None:
        self._training: set[_Line] = set()
        self._made: dict[int, _Made] = {}
        self._observed: set[_Line] = set()
        self.has_values_of_python = False
        """Whether gradients depend on what Python or NumPy computes in a step."""

    def begin_step(self) -> None:
        """Forget the tensors of the step before."""
        self._made.clear()

    def end_step(self) -> None:
        """Let go of a step's tensors."""
        self._made.clear()

    def note(
        self, line: _Line, operands: Iterable[Any], made: Any, changed: Any = None, *, is_from_python: bool = False
    ) -> None:
        """Note that a line computed `made` of `operands`, and perhaps `changed` one of them; or made it of Python's."""
        self._observed.add(line)
        known = [self._made[id(one)] for one in tree_leaves(operands) if id(one) in self._made]
        lines = frozenset({line}).union(*(one.lines for one in known))
        is_from_python |= any(one.is_from_python for one in known)
        tensors = [one for one in (*tree_leaves(made), changed) if isinstance(one, torch.Tensor)]
        if any(one.requires_grad for one in tensors):
            self._training |= lines
            self.has_values_of_python |= is_from_python
        else:
            self._made.update({id(one): _Made(one, lines, is_from_python) for one in tensors})

    def note_training(self, line: _Line) -> None:
        """Note a line that computes gradients."""
        self._training.add(line)

    def observed(self) -> tuple[str, ...]:
        """Return the lines in which torch computes."""
        return tuple(sorted(line_text(*line) for line in self._observed))

    def texts(self) -> tuple[str, ...]:
        """Return the lines that contribute."""
        return tuple(sorted(line_text(*line) for line in self._training))
