"""Classes and functions of the training script, in batches that come back from a Ray worker.

A script's own classes reach a worker by value, because no machine can import the script; the worker knows them under a
name that means nothing there. On the way back the name comes first, so that a batch has the very classes of the
script, as from a local worker; where there is no such name (the training process is itself a Ray task of another
script), the value.
"""

from __future__ import annotations

import functools
import sys
from operator import attrgetter
from types import FunctionType
from typing import Any

from penstock.feed.sources.extras import need


def carry(named: type | FunctionType) -> tuple[Any, ...] | None:
    """Return how to pickle a class or function that cannot be imported; None for one that can."""
    if _found(named.__module__, named.__qualname__) is named:
        return None
    return recall, (named.__module__, named.__qualname__, _value(named))


def recall(module: str, name: str, value: bytes) -> Any:
    """Return the class or function of this name; if there is none here, what `value` says."""
    found = _found(module, name)
    return _made(value) if found is None else found


def _found(module: str, name: str) -> Any:
    try:
        return attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):
        return None


@functools.lru_cache(maxsize=256)
def _value(named: Any) -> bytes:
    value: bytes = need("ray.cloudpickle", "ray").dumps(named)
    return value


@functools.lru_cache(maxsize=256)
def _made(value: bytes) -> Any:
    return need("ray.cloudpickle", "ray").loads(value)
