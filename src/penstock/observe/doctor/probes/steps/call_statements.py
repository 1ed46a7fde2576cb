"""Statements of a step that call something and drop what it returns, with all that passes beneath them.

What such a statement does for training, it does through objects: tensors, which `TrainingLines` follows, or state that
the loader or an optimizer looks at. Here is what objects it can reach.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import itertools
import logging
import re
import sys
from collections import deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from types import (
    BuiltinMethodType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from penstock.core.object_attributes import values_of
from penstock.core.package_folder import PACKAGE_FOLDER
from penstock.observe.doctor.probes.frame_variables import variables_of
from penstock.observe.doctor.probes.source_lines import extent, statements_at
from penstock.observe.doctor.probes.steps.assigned_names import names_of
from penstock.observe.doctor.probes.steps.step_calls import NOT_THE_USERS

_CALL = re.compile(r"^[A-Za-z_][\w.]*(\[[^\]]*\])?[\w.]*\(")
_MOST_OBJECTS = 20_000
_MOST_ELEMENTS = 64
"""Of a container: those of a long one are alike."""

_NO_STATE = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    np.generic,
    np.dtype,
    torch.dtype,
    torch.device,
    torch.Size,
    PurePath,
    re.Pattern,
    ModuleType,
    logging.Logger,
    argparse.Namespace,
)
"""What many objects share, and none of them writes into."""

_CODE = (
    FunctionType,
    MethodType,
    BuiltinMethodType,
    functools.partial,
    type,
    classmethod,
    staticmethod,
    property,
    GetSetDescriptorType,
    MemberDescriptorType,
)
"""What has no state of its own."""


@dataclass(slots=True)
class Reached:
    """The objects that a statement can reach."""

    ids: set[int] = field(default_factory=set)
    is_unknown: bool = False
    """Whether there may be others."""

    trains: bool = False
    """Whether there is an optimizer, a schedule or a loader among them."""

    read: set[str] = field(default_factory=set)
    """The names that their functions read."""

    assigned: set[str] = field(default_factory=set)
    """The names that their functions give other values, of variables and of attributes."""

    memory: list[tuple[int, int]] = field(default_factory=list)
    """Where the numbers of their tensors and arrays begin and end."""

    def note_code(self, one: Any) -> None:
        """Note what a function or method of the program's assigns."""
        function = one.__func__ if isinstance(one, classmethod) else one
        if isinstance(function, FunctionType) and is_users(function.__code__.co_filename):
            names = names_of(function.__code__, has_object=function is one)
            self.read |= names.read
            self.assigned |= names.assigned
            self.is_unknown |= names.is_unknown

    def is_apart_from(self, other: Reached) -> bool:
        """Return whether what changes these objects changes nothing of `other`, and no optimizer."""
        if self.is_unknown or other.is_unknown or self.trains or self.ids & other.ids or self.assigned & other.read:
            return False
        return not any(start < end and begin < stop for start, stop in self.memory for begin, end in other.memory)


@functools.lru_cache(maxsize=1024)
def call_statement(file: str, number: int) -> range | None:
    """Return the lines of the statement at a line, if it only calls something and drops the result; else None."""
    return extent(found) if (found := _call_at(file, number)) is not None else None


def _call_at(file: str, number: int) -> ast.Expr | None:
    around = statements_at(file, number)
    alike = [one for one in around if extent(one) == extent(around[0])]  # those of one line, after semicolons
    first = around[0] if len(alike) == 1 else None
    return first if isinstance(first, ast.Expr) and isinstance(first.value, ast.Call) else None


def looks_like_call(text: str) -> bool:
    """Return whether a line of source may begin such a statement.

    >>> looks_like_call("log.add(step)"), looks_like_call("loss = model(x)")
    (True, False)
    """
    return bool(_CALL.match(text))


def reached_by(frame: FrameType, number: int) -> Reached:
    """Return the objects that the statement at this line of a frame can reach."""
    statement = _call_at(frame.f_code.co_filename, number)
    if statement is None:
        return Reached(is_unknown=True)
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    members = {node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
    held = {**frame.f_globals, **variables_of(frame)}
    try:
        return reach(one for name in names if name in held for one in _members(held[name], members))
    except Exception:  # of objects that cannot be asked for what they hold; the program goes on
        return Reached(is_unknown=True)


def reach(roots: Iterable[Any]) -> Reached:
    """Return the objects with a state that can be reached from `roots`; no code of theirs runs."""
    reached, queue = Reached(), deque(roots)
    kept: dict[int, Any] = {}  # so that none of them takes the place of another
    while queue:
        one = queue.popleft()
        kind = type(one)
        if issubclass(kind, _NO_STATE) or id(one) in kept:
            continue
        kept[id(one)] = one
        if len(kept) > _MOST_OBJECTS or issubclass(kind, GeneratorType):
            reached.is_unknown = True
            return reached
        if not issubclass(kind, _CODE):
            reached.ids.add(id(one))
        else:
            reached.note_code(one)
        if issubclass(kind, torch.Tensor | np.ndarray):
            reached.memory.append(_memory(one))
        if issubclass(kind, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler | DataLoader):
            reached.trains = True
        elif not issubclass(kind, torch.Tensor | torch.nn.Module | np.ndarray):
            queue.extend(_children(one, kind))
    return reached


def _children(one: Any, kind: type) -> Iterator[Any]:
    if issubclass(kind, type):
        yield from vars(one).values() if is_users(getattr(sys.modules.get(one.__module__), "__file__", None)) else ()
        return
    yield from _parts_of_code(one, kind) if issubclass(kind, _CODE) else _elements(one, kind)
    yield from values_of(one)
    yield from kind.__mro__
    for base in kind.__mro__ if not issubclass(kind, _CODE) else ():
        for member in vars(base).values():
            if isinstance(member, MemberDescriptorType) and member.__objclass__ is base:  # of __slots__
                with contextlib.suppress(AttributeError):
                    yield member.__get__(one)


def _parts_of_code(one: Any, kind: type) -> Iterator[Any]:
    if issubclass(kind, FunctionType):
        yield from _of_function(one)
    elif issubclass(kind, MethodType):
        yield from (one.__self__, one.__func__)
    elif issubclass(kind, BuiltinMethodType):
        yield one.__self__
    elif issubclass(kind, property):
        yield from (one.fget, one.fset)
    elif issubclass(kind, functools.partial):
        yield from (one.func, one.args, one.keywords)
    elif issubclass(kind, classmethod | staticmethod):
        yield one.__func__


def _elements(one: Any, kind: type) -> Iterator[Any]:
    """Yield some elements of a container."""
    if issubclass(kind, dict):
        yield from list(itertools.islice(dict.values(one), _MOST_ELEMENTS))
        return
    for base in (list, tuple, set, frozenset, deque):
        if issubclass(kind, base):
            yield from list(itertools.islice(base.__iter__(one), _MOST_ELEMENTS))


def _of_function(function: FunctionType) -> Iterator[Any]:
    """Yield what a function of the program's holds, and the variables of its module that it names."""
    yield from function.__defaults__ or ()
    is_own = is_users(function.__code__.co_filename)
    names = names_of(function.__code__).read if is_own else frozenset[str]()
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # empty still
            yield from _members(cell.cell_contents, names)
    for name in names & function.__globals__.keys():
        yield from _members(function.__globals__[name], names)


def _members(value: Any, names: Container[str], depth: int = 3) -> Iterator[Any]:
    """Yield a value; of a module of the program's, those of its variables that are named."""
    if not isinstance(value, ModuleType):
        yield value
    elif depth and is_users(getattr(value, "__file__", None)):
        for name, member in list(vars(value).items()):
            if name in names:
                yield from _members(member, names, depth - 1)


def _memory(one: torch.Tensor | np.ndarray[Any, Any]) -> tuple[int, int]:
    """Return where the numbers of a tensor or array begin and end; nothing where they have no place."""
    if isinstance(one, np.ndarray):
        if not one.size:
            return 0, 0
        steps = [(size - 1) * stride for size, stride in zip(one.shape, one.strides, strict=True)]
        start = one.__array_interface__["data"][0]
        return start + sum(min(0, step) for step in steps), start + sum(max(0, step) for step in steps) + one.itemsize
    try:
        storage = one.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    except Exception:  # a sparse one, one of torch.func
        return 0, 0


def is_users(file: str | None) -> bool:
    """Return whether a file was written for this program."""
    return file is not None and not file.startswith(("<", PACKAGE_FOLDER, *NOT_THE_USERS))


def reached_by_loader(loader: DataLoader[Any]) -> Reached:
    """Return the objects that a loader makes its batches of."""
    return reach((loader.dataset, loader.sampler, loader.batch_sampler, loader.collate_fn, loader.worker_init_fn))
