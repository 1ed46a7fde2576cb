"""KnownOptimizer: what an optimizer that is not torch's consists of, compared at once with what it was before.

Its step can be undone from copies, or, where that is proven, be resumed where it failed, as the step of one of torch's,
and then needs no copies. That takes three proofs, from two steps that had copies: they change the same tensors equally
often, version counters show all of these changes (not those that are made through `.data`), and the step can be resumed
from wherever it fails (`step_proof.py`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain, compress, repeat
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.memory.model_tensors import storage_key
from penstock.memory.recovery.failure import FailureLog
from penstock.memory.recovery.random_state import RandomState
from penstock.memory.recovery.resume_optimizer import PartialStepError, StepResumption
from penstock.memory.recovery.state_tree import StateTree, is_leaf, refill

_class: Any = Tensor
_grad_of, _version, _is_sparse = _class.grad.__get__, _class._version.__get__, _class.is_sparse.__get__


_MOST_KINDS = 64
"""Kinds of steps (which parameters have gradients) that are remembered, as of a model with experts."""


class Stage(Enum):
    """What is known about the steps of a kind."""

    NEW = auto()
    COUNTED = auto()
    RESUMABLE = auto()
    UNPROVEN = auto()


@dataclass(slots=True)
class StepKind:
    """Steps with gradients of the same parameters."""

    stage: Stage = Stage.NEW
    changes: list[int] = field(default_factory=list)
    """How often a step changes each tensor."""
    is_counted: bool = False
    """Whether version counters show all of these changes, and steps are seen to be equal."""


@dataclass(frozen=True, slots=True)
class BegunStep:
    """What there was before a step."""

    kind: StepKind
    tensors: list[Tensor]
    """All that it may change in place: parameters, moments and gradients."""
    versions: list[int]
    places: list[int]
    """Where their data is."""
    contents: list[Any]
    """Copies of all containers."""
    grads: list[Tensor | None]
    generators: list[Any]
    random: RandomState

    def versions_now(self) -> list[int]:
        """Return the versions that they have by now."""
        return [*map(_version, self.tensors)]

    def changes(self) -> list[int]:
        """Return how often each tensor has been changed since."""
        return [*map(operator.sub, self.versions_now(), self.versions)]

    def has_moved(self) -> bool:
        """Return whether the data of a tensor has been replaced since."""
        return self.places != [*map(Tensor.data_ptr, self.tensors)]


class KnownOptimizer:
    """What `tree` found to be reached from an optimizer.

    Nothing on the way of a step that succeeds is done per parameter, but by functions that are C.

    Args:
        optimizer: what is stepped.
        tree: of it, before a step.
    """

    def __init__(self, optimizer: Optimizer, tree: StateTree) -> None:
        self._optimizer = optimizer
        self._leaves = [leaf for leaf, _ in tree.gradients]
        grads = {id(grad) for _, grad in tree.gradients}
        self._tensors = [one for one in tree.tensors if id(one) not in grads]
        self._dicts = [one for one, _ in tree.containers if isinstance(one, dict)]
        self._others = [one for one, _ in tree.containers if not isinstance(one, dict)]
        self._generators = [(get, put) for get, put, _ in tree.generators]
        self._devices = {one.device for one in self._tensors if one.device.type not in ("cpu", "meta")}
        every = [*self._leaves, *(grad for _, grad in tree.gradients if grad is not None), *tree.tensors]
        self.is_plain = not tree.unknown and not tree.has_slots and all(map(_is_plain, every))
        """Whether it can be compared and put back in this way at all."""
        contents, flat = self._look()
        self._sizes = [*map(len, contents)]
        self._types = [*map(type, flat)]
        self._selected = [not is_leaf(kind) for kind in self._types]
        self._held = [*compress(flat, self._selected)]
        """All that has content of its own; what has none, numbers say, may change from step to step."""
        self._kinds: dict[bytes, StepKind] = {}

    def begin(self) -> BegunStep | None:
        """Return what there is before a step; None if it is not what there was when the step became known."""
        contents, flat = self._look()
        if self._sizes != [*map(len, contents)] or self._types != [*map(type, flat)]:
            return None
        if not all(map(operator.is_, compress(flat, self._selected), self._held)):
            return None
        grads = [*map(_grad_of, self._leaves)]
        present = [*compress(grads, map(operator.is_not, grads, repeat(None)))]
        if any(map(_is_sparse, present)):
            return None
        key = bytes(map(operator.is_, grads, repeat(None)))
        if key not in self._kinds and len(self._kinds) >= _MOST_KINDS:
            return None
        kind = self._kinds.setdefault(key, StepKind())
        tensors = self._tensors + present
        places, generators = [*map(Tensor.data_ptr, tensors)], [get() for get, _ in self._generators]
        random = RandomState.now(self._devices)
        return BegunStep(kind, tensors, [*map(_version, tensors)], places, contents, grads, generators, random)

    def put_back(self, begun: BegunStep) -> None:
        """Put back all but the values of tensors."""
        for container, content in zip((*self._dicts, *self._others), begun.contents, strict=True):
            refill(container, content)
        for leaf, grad in zip(self._leaves, begun.grads, strict=True):
            leaf.grad = grad
        for (_, put), state in zip(self._generators, begun.generators, strict=True):
            put(state)
        begun.random.restore()

    def resume(self, begun: BegunStep, log: FailureLog) -> None:
        """Do the rest of a step that has failed.

        Raises:
            PartialStepError: it cannot be done, or nobody can know whether it was done right.
        """
        keys = [*map(storage_key, begun.tensors)]
        done = dict(zip(keys, begun.changes(), strict=True))
        if len(done) < len(keys) or begun.has_moved():
            raise PartialStepError("it has given a tensor other memory")
        self.put_back(begun)
        resumption = StepResumption(done, dict(zip(keys, begun.kind.changes, strict=True)), log)
        try:
            with resumption:
                self._optimizer.step()
        except Exception as error:
            raise PartialStepError(str(error)) from error
        tree = StateTree(self._optimizer)
        grads = {id(grad) for _, grad in tree.gradients}
        resumption.check(one for one in tree.tensors if id(one) not in grads)

    def _look(self) -> tuple[list[Any], list[Any]]:
        """Return copies of all containers, and all that they hold."""
        dicts, others = [*map(dict, self._dicts)], [*map(list, self._others)]
        return [*dicts, *others], [*chain.from_iterable(map(dict.values, dicts)), *chain.from_iterable(others)]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
