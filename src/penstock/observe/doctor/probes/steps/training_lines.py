"""Which lines of a step contribute to its gradients.

A line does if it computes a tensor that requires gradients, or one of which such a tensor is computed later in the
step: a teacher's outputs do, a histogram of the gradients does not.
"""

from __future__ import annotations

import weakref
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
        self._unknown: dict[int, weakref.ref[torch.Tensor]] = {}
        """Tensors that no observed operation of this step has made: kept ones, and those of `torch.from_numpy`."""
        self._outside: list[list[weakref.ref[torch.Tensor]]] = []
        self._depends_on_python = False

    def begin_step(self, batch: Any) -> None:
        """Forget the tensors of the step before; this one gets `batch`."""
        self._made = {id(one): _Made(one, frozenset(), False) for one in _tensors(batch)}

    def end_step(self) -> None:
        """Let go of a step's tensors."""
        self._made.clear()
        self._outside.append(list(self._unknown.values()))
        self._unknown.clear()

    def note(
        self, line: _Line, operands: Iterable[Any], made: Any, changed: Any = None, *, is_from_python: bool = False
    ) -> None:
        """Note that a line computed `made` of `operands`, and perhaps `changed` one of them; or made it of Python's."""
        self._observed.add(line)
        for one in _tensors(operands):
            if id(one) not in self._made and not one.requires_grad:
                self._unknown.setdefault(id(one), weakref.ref(one))
        known = [self._made[id(one)] for one in tree_leaves(operands) if id(one) in self._made]
        lines = frozenset({line}).union(*(one.lines for one in known))
        is_from_python |= any(one.is_from_python for one in known)
        tensors = _tensors((made, changed))
        if any(one.requires_grad for one in tensors):
            self._training |= lines
            self._depends_on_python |= is_from_python
        else:
            self._made.update({id(one): _Made(one, lines, is_from_python) for one in tensors})

    def note_training(self, line: _Line) -> None:
        """Note a line that computes gradients."""
        self._training.add(line)

    @property
    def has_values_of_python(self) -> bool:
        """Whether gradients may depend on what Python or NumPy computes in a step."""
        gone = any(one() is None for step in self._outside[:-1] for one in step)
        return self._depends_on_python or gone

    def observed(self) -> tuple[str, ...]:
        """Return the lines in which torch computes."""
        return tuple(sorted(line_text(*line) for line in self._observed))

    def texts(self) -> tuple[str, ...]:
        """Return the lines that contribute."""
        return tuple(sorted(line_text(*line) for line in self._training))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]
