"""What `penstock doctor` examines: a script, a module that is run, or an object of a module, each with arguments."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.cli.import_object import import_object
from penstock.core.errors import PenstockError
from penstock.launch.program import load_program


def is_object(command: Sequence[str]) -> bool:
    """Return whether a command names an object of a module, as in `train:main`, and not a script.

    >>> is_object(["train:main"]), is_object(["train.py"]), is_object(["-m", "train"])
    (True, False, False)
    """
    name = command[0]
    is_script = name == "-m" or name.endswith((".py", ".zip", ".pyz")) or (bool(name) and Path(name).exists())
    return not is_script


def load_loop(command: Sequence[str]) -> Any:
    """Return the loop that a command names; `sys.argv` is the program's own from then on.

    Args:
        command: `["module:object", *args]`, or a script or module as `penstock run` takes it.

    Raises:
        PenstockError: there is no such script, module or object, or importing it fails.
    """
    if not is_object(command):
        return load_program(command)
    name, *args = command
    if ":" not in name:
        raise PenstockError(f"expected module:object, as in train:step, or a script that exists, got {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    sys.argv = [_file_of(name.partition(":")[0]), *args]
    return import_object(name)


def _file_of(module: str) -> str:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return module
    return spec.origin or module if spec is not None else module
