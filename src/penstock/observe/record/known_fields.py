"""Builds dataclasses from JSON objects that a newer version of penstock may have written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

_Data = TypeVar("_Data")


def build_from_known(cls: type[_Data], data: Mapping[str, Any]) -> _Data:
    """Return a `cls` made of the entries of `data` that are fields of it; the others are ignored.

    It reverses `dataclasses.asdict`, through JSON too: where a field is a dataclass, a tuple of them, or either or
    None, it is made in the same way.

    Raises:
        TypeError: a field without a default is missing.
    """
    types = _types(cls)  # type: ignore[arg-type]  # a class is hashable
    return cls(**{name: _value(types[name], value) for name, value in data.items() if name in types})


@cache
def _types(cls: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {one.name: hints[one.name] for one in fields(cls)}


def _value(kind: Any, value: Any) -> Any:
    if get_origin(kind) in (Union, UnionType) and value is not None:
        kind = next(one for one in get_args(kind) if one is not type(None))
    if is_dataclass(kind) and isinstance(value, Mapping):
        return build_from_known(kind, value)  # type: ignore[arg-type]
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        items = get_args(kind)
        if items[-1:] == (...,):
            items = items[:1] * len(value)
        return tuple(map(_value, items, value))
    return value
