"""The attributes of the user's objects, read without asking for their `__dict__`.

CPython 3.11 and 3.12 keep the attributes of an object in an array until somebody asks for its `__dict__` (`vars`,
`hasattr(one, "__dict__")`, `copy.copy` and pickle do, too). From then on every attribute of that object is looked up in
a dict, for as long as it lives: samples that read attributes often take up to half again as long.

So attributes are looked up by the names that the code of the object's class mentions. Those that only `setattr` with a
computed name, or code outside of the class, has set are not found. Objects that keep a dict anyway are asked for it:
modules, functions, classes, tensors, `torch.nn.Module` (whose `__setattr__` asks for it).
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from types import CodeType, MemberDescriptorType, ModuleType
from typing import Any

import torch

_MANAGED_DICT = 1 << 4
"""Py_TPFLAGS_MANAGED_DICT, of types whose objects may have attributes in an array."""

_CONTAINERS = (list, tuple, dict, set, frozenset)
_MISSING = object()
_names: weakref.WeakKeyDictionary[type, dict[str, Any]] = weakref.WeakKeyDictionary()
"""What the code of a class mentions, with what the class has by these names, as a default."""


def attributes_of(thing: Any) -> dict[str, Any]:
    """Return the attributes that an object has by itself, by name; no code of its class runs.

    >>> class Numbers:
    ...     scale = 1
    ...     def __init__(self):
    ...         self.data, self.loss = [1, 2], 0.5
    >>> sorted(attributes_of(Numbers()).items())
    [('data', [1, 2]), ('loss', 0.5)]
    """
    if not _may_have_an_array(thing):
        return _dict_of(thing)
    if in_use := _dict_in_use(thing):
        return in_use
    found: dict[str, Any] = {}
    for name, default in _names_in(type(thing)).items():
        with contextlib.suppress(AttributeError):
            value = object.__getattribute__(thing, name)
            if value is not default:
                found[name] = value
    return found


def values_of(thing: Any) -> list[Any]:
    """Return the values of an object's attributes, also of those whose names nobody knows; its class may be one."""
    if not _may_have_an_array(thing):
        return [*_dict_of(thing).values()]
    if issubclass(type(thing), _CONTAINERS):  # the elements are no attributes
        return [*attributes_of(thing).values()]
    return [*_dict_in_use(thing).values()] or gc.get_referents(thing)


def has_attributes(thing: Any) -> bool:
    """Return whether an object can have attributes of its own."""
    return type(thing).__dictoffset__ != 0


def _may_have_an_array(thing: Any) -> bool:
    kind = type(thing)
    has_dict = issubclass(kind, type | ModuleType | torch.nn.Module | torch.Tensor)
    return not has_dict and (bool(kind.__flags__ & _MANAGED_DICT) or not kind.__dictoffset__)


def _dict_of(thing: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(thing, "__dict__")  # a class's own way to give attributes may do anything
    except AttributeError:
        return {}
    return dict(found) if isinstance(found, dict) else {}


def _dict_in_use(thing: Any) -> dict[str, Any]:
    """Return the dict that an object keeps since somebody has asked for it; empty if nobody has."""
    if not type(thing).__flags__ & _MANAGED_DICT or issubclass(type(thing), _CONTAINERS):
        return {}
    for one in gc.get_referents(thing):
        if type(one) is dict and one and all(type(name) is str for name in one):
            read = [(name, value) for name, value in one.items() if not _is_computed(type(thing), name)]
            if read and all(_read(thing, name) is value for name, value in read):
                return dict(one)
    return {}


def _read(thing: Any, name: str) -> Any:
    try:
        return object.__getattribute__(thing, name)
    except AttributeError:
        return _MISSING


def _of_class(kind: type, name: str) -> Any:
    return next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), _MISSING)


def _is_computed(kind: type, name: str) -> bool:
    """Return whether a class has a method or a property of this name, whose code must not run."""
    of_class = _of_class(kind, name)
    return hasattr(type(of_class), "__get__") and type(of_class) is not MemberDescriptorType


def _names_in(kind: type) -> dict[str, Any]:
    """Return the names that the code of a class and of those that it inherits from mentions."""
    if kind not in _names:
        found: dict[str, None] = {}
        for one in kind.__mro__:
            mentioned = [*vars(one).get("__dataclass_fields__", ()), *vars(one).get("__annotations__", ())]
            for member in vars(one).values():
                mentioned += [name for code in _codes_in(member) for name in code.co_names]
            found.update(dict.fromkeys(mentioned))
        own = [name for name in found if not (name.startswith("__") and name.endswith("__"))]
        _names[kind] = {name: _of_class(kind, name) for name in own if not _is_computed(kind, name)}
    return _names[kind]


def _codes_in(member: Any) -> Iterator[CodeType]:
    """Yield the code of a method, a property or a class's method, that of functions inside of it too."""
    left = [member, getattr(member, "fget", None), getattr(member, "fset", None), getattr(member, "func", None)]
    for function in [one for one in left if one is not None]:
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        codes = [getattr(getattr(function, "__func__", function), "__code__", None)]
        while codes:
            code = codes.pop()
            if isinstance(code, CodeType):
                yield code
                codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
