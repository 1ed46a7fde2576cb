"""Imports objects that are named on the command line, as in `train:step`."""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import Any

from penstock.core.errors import PenstockError
from penstock.core.package_folder import PACKAGE_FOLDER


def import_object(name: str) -> Any:
    """Return the object "module:object". Modules are searched in the current folder first.

    An exception of the module's own is printed with its traceback.

    Raises:
        PenstockError: there is no such module or object, or importing it fails.
    """
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        stem = module.removesuffix(".py")
        hint = f"; for an object of that script, give {stem}:NAME" if stem != module else ""
        raise PenstockError(f"expected module:object, as in train:step, got {name!r}{hint}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise  # the command says where to install it
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _program_error(module, error) from error
        raise PenstockError(f"{name!r} cannot be imported ({error}); give module:object, as in train:step") from error
    except Exception as error:
        raise _program_error(module, error) from error
    try:
        return getattr(imported, attribute)
    except AttributeError as error:
        own = [each for each, value in vars(imported).items() if getattr(value, "__module__", None) == module]
        has = f"it has {', '.join(own[:8])}" if own else "give module:object, as in train:step"
        raise PenstockError(f"{name!r} cannot be imported ({error}); {has}") from error


def print_own_traceback(error: BaseException) -> None:
    """Print an exception of the user's program, from the first frame of that program on."""
    trace, others = error.__traceback__, (PACKAGE_FOLDER, importlib.__file__, "<frozen importlib")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(others):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _program_error(module: str, error: Exception) -> PenstockError:
    print_own_traceback(error)
    return PenstockError(f"importing {module!r} raised this exception; fix it first")


def call_object(name: str) -> Any:
    """Return the result of the function "module:function", called without arguments.

    Raises:
        PenstockError: as for `import_object`, or the object is not callable.
    """
    function = import_object(name)
    if not callable(function):
        raise PenstockError(f"{name} must be a function, not {type(function).__name__}")
    return function()
