"""Graphs of earlier steps that are alive when a later one computes its gradients, and the variable that holds them.

A mark is put into the metadata of the autograd nodes that a step makes, which live as long as the nodes do. A loop that
holds losses and outputs by variables alone frees their graphs as soon as the next forward pass has assigned these.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any

import torch

from penstock.core.object_attributes import attributes_of
from penstock.observe.doctor.probes.frame_variables import variables_of

_NAME = "penstock.step"
_LEAST_STEPS = 3
"""An earlier loss may be kept for one step, by another variable."""

_DEPTH = 6
_LAST = 64
"""As many of a container's values are looked at."""


class KeptGraphs:
    """Follows the graphs of a loop's losses and outputs."""

    def __init__(self) -> None:
        self._step = 0
        self._mark: _Mark | None = None
        self._earlier: list[weakref.ref[_Mark]] = []
        self.holder: str | None = None
        """The variable that holds the graphs of all earlier steps, as `meter.sum`; None where none is known to."""

    def note_made(self, step: int, made: Any) -> None:
        """Note what an operation of a step has made."""
        if step != self._step:
            self._step = step
            self._earlier += [] if self._mark is None else [weakref.ref(self._mark)]
            self._mark = _Mark()  # the mark of the step before now lives in that step's nodes alone
        if isinstance(made, torch.Tensor) and made.grad_fn is not None:
            node: Any = made.grad_fn
            node.metadata.setdefault(_NAME, self._mark)

    def note_backward(self, step: int, frames: Iterable[FrameType]) -> None:
        """Note that a step computes gradients.

        Args:
            step: its number.
            frames: the functions of the program that run, innermost first.
        """
        earlier = [mark() for mark in self._earlier]
        if step >= _LEAST_STEPS and earlier and None not in earlier:
            self.holder = _find_holder(earlier[0], frames)


class _Mark:
    __slots__ = ("__weakref__",)


def _find_holder(mark: _Mark | None, frames: Iterable[FrameType]) -> str | None:
    """Return the name of what holds the graph with this mark."""
    seen_globals: set[int] = set()
    for frame in frames:
        scopes = [variables_of(frame)]
        if id(frame.f_globals) not in seen_globals:
            seen_globals.add(id(frame.f_globals))
            scopes.append(frame.f_globals)
        for name, value in _variables(scopes):
            if any(_has_mark(one, mark) for one in _tensors(value)):
                return name
    return None


def _variables(scopes: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield names and values, and those of the attributes of objects."""
    for scope in scopes:
        for name, value in [*scope.items()]:
            yield name, value
            if issubclass(type(value), type | ModuleType | torch.Tensor):
                continue
            yield from ((f"{name}.{attribute}", one) for attribute, one in attributes_of(value).items())


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return a tensor, or the last ones of a container that keeps all; a bounded queue keeps the last few only."""
    if type(value) is deque and value.maxlen is not None:
        return []
    if type(value) in (dict, defaultdict):
        value = [*value.values()]
    if type(value) in (list, tuple, deque):
        return [one for one in [*value][-_LAST:] if issubclass(type(one), torch.Tensor)]
    return [value] if issubclass(type(value), torch.Tensor) else []


def _has_mark(tensor: torch.Tensor, mark: _Mark | None) -> bool:
    """Return whether a tensor was computed of the loss with this mark, or is it."""
    nodes: list[Any] = [tensor.grad_fn]
    for _ in range(_DEPTH):
        known = [node for node in nodes if node is not None]
        if any(node.metadata.get(_NAME) is mark for node in known):
            return True
        nodes = [node for parent in known for node, _ in parent.next_functions]
    return False
