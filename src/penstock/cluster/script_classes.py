"""How classes and functions of the training script travel in batches that come back from a Ray worker.

A script's own classes reach a worker by value, because no machine can import the script; the worker knows them under a
name that does not exist there. On the way back the name is tried first, so that a batch has the script's own classes,
as from a local worker. Where the name does not exist (the training process is itself a Ray task of another script), the
value is used.
"""

from __future__ import annotations

import functools
import sys
from operator import attrgetter
from types import FunctionType
from typing import Any

from penstock.data.optional import need


def reduce_script_class(target: type | FunctionType) -> tuple[Any, ...] | None:
    """Return how to pickle a class or function that cannot be imported; None for one that can."""
    if _find(target.__module__, target.__qualname__) is target:
        return None
    return restore_script_class, (target.__module__, target.__qualname__, _pickle(target))


def restore_script_class(module: str, name: str, value: bytes) -> Any:
    """Return the class or function of this name; if there is none here, the one that `value` pickles."""
    found = _find(module, name)
    return _unpickle(value) if found is None else found


def _find(module: str, name: str) -> Any:
    try:
        return attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):
        return None


@functools.lru_cache(maxsize=256)
def _pickle(target: Any) -> bytes:
    value: bytes = need("ray.cloudpickle", "ray").dumps(target)
    return value


@functools.lru_cache(maxsize=256)
def _unpickle(value: bytes) -> Any:
    return need("ray.cloudpickle", "ray").loads(value)
