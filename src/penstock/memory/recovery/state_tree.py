"""StateTree: everything that can be reached from an object, so that a change of it can be undone.

Optimizers that are not torch's keep what they remember in many places: tensors in lists and dicts inside a parameter's
state, in parameter groups, in attributes, in optimizers inside of them. The walk follows dicts, lists, tuples, sets,
queues, the attributes of objects and of tensors, and what the user's functions enclose. Methods are not looked into.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import logging
import operator
import random
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.distributed.rank_group import local_tensor
from penstock.memory.user_lines import is_users

_LEAVES = (
    type(None), bool, int, float, complex, str, bytes, type, range, slice, property, enum.Enum, re.Pattern, np.generic,
    np.dtype, types.ModuleType, types.BuiltinFunctionType, types.MethodType,
    types.MethodWrapperType, types.WrapperDescriptorType, functools.partial, weakref.ref, logging.Logger, io.IOBase,
    type(threading.Lock()), type(threading.RLock()), torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Stream, torch.Event,
)  # fmt: skip
"""What has no content that a step could change, or none that weights depend on."""

_MOST_ITEMS = 100_000
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_Walk = Callable[["StateTree", Any], None]


class StateTree:
    """What some objects consist of now.

    Args:
        roots: objects, an optimizer for example.
        only: the class whose objects are looked into, beside containers and tensors; by default all are.
    """

    def __init__(self, *roots: object, only: type = object) -> None:
        self.tensors: list[Tensor] = []
        """All tensors, each once; of distributed ones this rank's part. Their values are not saved."""
        self.optimizers: list[Optimizer] = []
        """All optimizers, `root` included."""
        self.unknown: list[type] = []
        """Types of objects that cannot be looked into, and may have changed."""
        self.gradients: list[tuple[Tensor, Tensor | None]] = []
        """The gradient of each tensor that may have one."""
        self.generators: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = []
        """Generators of random numbers, and arrays: what reads their state, what puts it back, and the state."""
        self._undo: list[Callable[[], object]] = []
        self.containers: list[tuple[Any, Any]] = []
        """All containers, each with a copy of what it holds."""
        self._only = only
        self._left = list(roots)
        self._walk()
        self.versions = [one._version for one in self.tensors]

    def restore(self) -> None:
        """Let all containers and objects hold what they held, and tensors have the gradient that they had."""
        for container, content in self.containers:
            refill(container, content)
        for tensor, grad in self.gradients:
            tensor.grad = grad
        for _, put, state in self.generators:
            put(state)
        for undo in self._undo:
            undo()

    def _walk(self) -> None:
        left, seen = self._left, set[int]()
        while left:
            value = left.pop()
            walk = _WALKS.get(type(value), _UNSEEN)
            if walk is _UNSEEN:
                walk = _WALKS[type(value)] = _choose_walk(type(value))
            if walk is not None and id(value) not in seen:
                seen.add(id(value))
                walk(self, value)

    def _walk_dict(self, value: dict[Any, Any]) -> None:
        if self._is_too_large(value):
            return
        self.containers.append((value, dict(value)))
        self._left += value.values()
        if not _NAMES.issuperset(map(type, value)):
            self._left += value

    def _is_too_large(self, value: Any) -> bool:
        """Return whether this is data rather than state, where not everything matters."""
        return self._only is not object and len(value) > _MOST_ITEMS

    def _walk_list(self, value: Any) -> None:
        if self._is_too_large(value):
            return
        content = list(value)
        self.containers.append((value, content))
        self._left += content

    def _walk_fixed(self, value: Any) -> None:
        self._left += value

    def _walk_tensor(self, tensor: Tensor) -> None:
        if tensor.is_leaf:
            grad = tensor.grad
            if tensor.requires_grad:
                self.gradients.append((tensor, grad))
            if grad is not None:
                self._left.append(grad)
        if (attributes := tensor.__dict__) or isinstance(tensor, torch.nn.Parameter):  # which a step may give its first
            self._left.append(attributes)
        own = tensor if type(tensor) in _PLAIN_TENSORS else local_tensor(tensor)
        inner: Any = own
        if type(own) not in _PLAIN_TENSORS and is_traceable_wrapper_subclass(inner):
            self._left += [getattr(own, name) for name in inner.__tensor_flatten__()[0]]
        else:
            self.tensors.append(own)

    def _walk_object(self, value: Any) -> None:
        if not isinstance(value, self._only):
            return
        if isinstance(value, Optimizer):
            self.optimizers.append(value)
        if hasattr(value, "__dict__"):
            self._left.append(value.__dict__)
        for name in _slots(type(value)):
            if hasattr(value, name):
                self._undo.append(functools.partial(object.__setattr__, value, name, getattr(value, name)))
                self._left.append(getattr(value, name))
            else:
                self._undo.append(functools.partial(_delete, value, name))

    def _walk_subclass(self, kind: _Walk, value: Any) -> None:
        kind(self, value)
        self._walk_object(value)

    def _keep(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self.generators.append((get, put, get()))

    def _walk_array(self, value: np.ndarray) -> None:
        self._keep(value.copy, functools.partial(np.copyto, value))
        if value.dtype.hasobject:
            self._left += value.flat

    def _walk_generator(self, value: torch.Generator) -> None:
        self._keep(value.get_state, value.set_state)

    def _walk_bit_generator(self, value: np.random.Generator) -> None:
        generator = value.bit_generator
        self._keep(lambda: generator.state, functools.partial(setattr, generator, "state"))

    def _walk_random_state(self, value: np.random.RandomState) -> None:
        self._keep(value.get_state, value.set_state)

    def _walk_python_random(self, value: random.Random) -> None:
        self._keep(value.getstate, value.setstate)

    def _walk_function(self, value: types.FunctionType) -> None:
        if self._only is not object or not is_users(value.__code__.co_filename):
            return
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                self._left.append(cell.cell_contents)
                if isinstance(cell.cell_contents, (int, float)):
                    self._undo.append(functools.partial(setattr, cell, "cell_contents", cell.cell_contents))

    def _walk_unknown(self, value: object) -> None:
        self.unknown.append(type(value))


def differs(container: Any, content: Any) -> bool:
    """Return whether a container holds something else than before; a dict, also whether in another order."""
    if len(container) != len(content):
        return True
    if isinstance(container, dict):
        return not all(map(operator.is_, container.values(), content.values())) or list(container) != list(content)
    return not all(map(operator.is_, container, content))


def refill(container: Any, content: Any) -> None:
    """Let a container hold other content; a dict with the same keys is changed only where it differs."""
    if isinstance(container, dict) and list(container) == list(content):
        for key, now in [*container.items()]:  # not by looking it up: that may make an object
            if now is not content[key]:
                container[key] = content[key]
        return
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(content)


_NAMES = frozenset({str, int})
_CONTAINERS: tuple[tuple[type | tuple[type, ...], _Walk], ...] = (
    (dict, StateTree._walk_dict),
    ((list, deque, set), StateTree._walk_list),
    ((tuple, frozenset), StateTree._walk_fixed),
)
_OTHERS: tuple[tuple[type, _Walk], ...] = (
    (Tensor, StateTree._walk_tensor),
    (np.ndarray, StateTree._walk_array),
    (types.FunctionType, StateTree._walk_function),
    (torch.Generator, StateTree._walk_generator),
    (np.random.Generator, StateTree._walk_bit_generator),
    (np.random.RandomState, StateTree._walk_random_state),
    (random.Random, StateTree._walk_python_random),
)


def _unseen(tree: StateTree, value: object) -> None:
    raise AssertionError("a mark, never called")


_UNSEEN: _Walk = _unseen
_WALKS: dict[type, _Walk | None] = {}
"""How to walk an object of a type; None for a leaf."""


def _choose_walk(kind: type) -> _Walk | None:
    if issubclass(kind, _LEAVES):
        return None
    for one, walk in _OTHERS:
        if issubclass(kind, one):
            return walk
    for classes, walk in _CONTAINERS:
        if issubclass(kind, classes):
            return _with_attributes(walk) if _has_attributes(kind) else walk
    if kind.__module__.startswith(("torch.distributed", "torch._C._distributed")) and not issubclass(kind, Optimizer):
        return None  # process groups and meshes
    return StateTree._walk_object if _has_attributes(kind) else StateTree._walk_unknown


def _with_attributes(walk: _Walk) -> _Walk:
    return lambda tree, value: tree._walk_subclass(walk, value)


def _has_attributes(kind: type) -> bool:
    return kind.__dictoffset__ != 0 or bool(_slots(kind))


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for one in kind.__mro__:
        slots = one.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        found += [
            f"_{one.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            for name in names
            if name not in ("__dict__", "__weakref__")
        ]
    return found


def _delete(value: object, name: str) -> None:
    if hasattr(value, name):
        object.__delattr__(value, name)
