"""Objects that the command line names, as in `train:step`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from penstock.core.errors import PenstockError


def named(name: str) -> Any:
    """Return the object named "module:object"; modules are looked for in the current folder first.

    Raises:
        PenstockError: there is no such module or object.
    """
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise PenstockError(f"{name!r} names no object in a module; name it as in train:step")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PenstockError(f"there is no {name!r} ({error}); name it as in train:step") from error


def called(name: str) -> Any:
    """Return what the function named "module:function" returns.

    Raises:
        PenstockError: as `named`, or it is no function.
    """
    function = named(name)
    if not callable(function):
        raise PenstockError(f"{name} is no function, but a {type(function).__name__}")
    return function()
