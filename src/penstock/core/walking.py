"""Walks through what other threads change meanwhile: statistics are asked for, and processes forked, at any time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

_Item = TypeVar("_Item")


def walk(items: Iterable[_Item]) -> list[_Item]:
    """Return what a set, deque, WeakSet or view of a dict holds at one moment; a generator could not begin again.

    Python raises a RuntimeError for one that was changed during the walk, which then begins again.

    >>> walk({"a": 1}.values())
    [1]
    """
    while True:
        try:
            return list(items)
        except RuntimeError:
            continue
