"""StepProof: whether a step of an optimizer can be resumed from every operation of it, seen from its operations.

A step that is resumed runs again from its start, and leaves out the changes of parameters and moments that were made
before the failure (`resume_optimizer.py`). What it computes meanwhile from a tensor that has changed since is another
value than the first time. That does no harm if the value flows only into changes that are left out. So it must have
been used up by the time that the tensor changes: then, wherever the step failed after that, it is not used again. What
has become a number may be used anywhere, so what it was read from must not change after that.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.memory.model_tensors import storage_key
from penstock.memory.recovery.retry_ops import written_tensors

_Sources = dict[int, int]
"""Watched storages that a value was computed from, each with the operation that read it first."""


class StepProof(TorchDispatchMode):
    """Observes the operations of one step.

    Args:
        watched: the storages (by their `_cdata`) of all that lasts: parameters, moments and gradients.
    """

    def __init__(self, watched: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.changes: Counter[int] = Counter()
        """How often each watched storage was changed."""
        self._watched = watched
        self._is_provable = True
        self.is_visible = True
        """Whether all operations were torch's own, whose schemas say what they change."""
        self._position = 0
        self._changed_at: dict[int, int] = {}
        """The last change of each watched storage."""
        self._sources: dict[int, _Sources] = {}
        """Of storages that do not last."""
        self._numbers: _Sources = {}
        """What numbers were read from."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @property
    def is_resumable(self) -> bool:
        """Whether the step may be resumed from wherever it fails."""
        return self._is_provable and all(self._changed_at.get(key, 0) <= at for key, at in self._numbers.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._position += 1
        read = {storage_key(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        sources = self._sources_of(read)
        result = func(*args, **kwargs)
        written = [storage_key(one) for one in written_tensors(func, args, kwargs)]
        made = {storage_key(one) for one in tree_leaves(result) if isinstance(one, Tensor)} - read
        if func.namespace not in ("aten", "prims", "profiler"):  # a kernel of somebody's, or ranks that meet
            self.is_visible = self._is_provable = False
        if any(key in self._watched for key in written):
            self._change(func, written, sources, makes_more=bool(made))
        else:
            for key in written:
                self._sources[key] = _merged(self._sources.get(key, {}), sources)
        for key in made:
            self._sources[key] = sources
        if any(isinstance(one, (bool, int, float, complex)) for one in tree_leaves(result)):
            self._numbers = _merged(self._numbers, sources)
        return result

    def _sources_of(self, read: set[int]) -> _Sources:
        found: _Sources = {}
        for key in read:
            found = _merged(found, {key: self._position} if key in self._watched else self._sources.get(key, {}))
        return found

    def _change(self, func: Any, written: list[int], sources: _Sources, *, makes_more: bool) -> None:
        is_late = any(self._changed_at.get(key, 0) > at for key, at in sources.items())
        is_random = torch.Tag.nondeterministic_seeded in func.tags  # left out, it would not draw its numbers
        if is_late or is_random or makes_more or not all(key in self._watched for key in written):
            self._is_provable = False
        for key in written:
            self._changed_at[key] = self._position
            self.changes[key] += 1


def _merged(one: _Sources, other: _Sources) -> _Sources:
    return {**one, **{key: min(at, one.get(key, at)) for key, at in other.items()}}
