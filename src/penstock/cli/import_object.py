"""Imports objects that are named on the command line, as in `train:step`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from penstock.core.errors import PenstockError


def import_object(name: str) -> Any:
    """Return the object "module:object". Modules are searched in the current folder first.

    Raises:
        PenstockError: there is no such module or object.
    """
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise PenstockError(f"expected module:object, as in train:step, got {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PenstockError(f"{name!r} cannot be imported ({error}); give module:object, as in train:step") from error


def call_object(name: str) -> Any:
    """Return the result of the function "module:function", called without arguments.

    Raises:
        PenstockError: as for `import_object`, or the object is not callable.
    """
    function = import_object(name)
    if not callable(function):
        raise PenstockError(f"{name} must be a function, not {type(function).__name__}")
    return function()
