"""Builds dataclasses from JSON objects that a newer version of penstock may have written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

_Data = TypeVar("_Data")


def build_from_known(cls: type[_Data], data: Mapping[str, Any]) -> _Data:
    """Return a `cls` made of the entries of `data` that are fields of it; the others are ignored.

    Raises:
        TypeError: a field without a default is missing.
    """
    names = {one.name for one in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in data.items() if name in names})
