"""Runs a program as `python SCRIPT` or `python -m MODULE` does: with the same `__main__`, argv, path and tracebacks.

`runpy` is no alternative: it restores the old `__main__` when the program returns, while its threads, exit handlers and
spawned workers still need it, and its frames appear in the program's tracebacks.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from penstock.core.errors import ScriptError

Program = Callable[[], None]
"""Runs the program once, to its end. Exceptions propagate; see `trim_traceback`."""


def load_program(command: Sequence[str]) -> Program:
    """Return the program of `command`: `[path, *args]`, or `["-m", name, *args]`.

    A path is a script, or a folder or zip file with a `__main__.py`, as for Python itself.

    Raises:
        ScriptError: there is no such script or module (for a module inside a package: when it is run).
    """
    if command[0] == "-m":
        return _module(command[1:])
    path = Path(command[0])
    if path.is_dir() or path.suffix in (".zip", ".pyz"):
        return _folder_or_zip(command)
    if not path.is_file():
        raise ScriptError(f"there is no script {command[0]!r} in {Path.cwd().name}/; {_what_to_give(command)}")
    return _script(command)


def _what_to_give(command: Sequence[str]) -> str:
    """Return what was probably meant by a path where no script is."""
    path, rest = Path(command[0]), " ".join(command[1:])
    if rest and path.name in ("torchrun", "accelerate", "deepspeed"):
        return f"launchers start penstock: {path.name} ... -m penstock run train.py"
    if rest and re.fullmatch(r"python[\d.]*|uv", path.name):
        return f"leave out {path.name}: it is run by {sys.executable}"
    near = get_close_matches(path.name, [each.name for each in path.parent.glob("*.py")], 1)
    return f"did you mean {str(path.with_name(near[0]))!r}?" if near else "give a .py file, or -m and a module"


def trim_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the launcher's frames at its beginning."""
    ours = (os.path.dirname(__file__), "<frozen importlib")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace


def _script(command: Sequence[str]) -> Program:
    file = os.path.abspath(command[0])  # as Python does, also in tracebacks
    with io.open_code(file) as stream:
        source = stream.read()

    def program() -> None:
        _set_path(str(Path(file).resolve().parent))
        main = _new_main(__file__=file, __loader__=SourceFileLoader("__main__", file))
        # dont_inherit: this file's own __future__ imports are not the program's.
        _run(main, compile(source, file, "exec", dont_inherit=True), command)

    return program


def _folder_or_zip(command: Sequence[str]) -> Program:
    folder = os.path.abspath(command[0])
    spec = PathFinder.find_spec("__main__", [folder])
    if spec is None:
        raise ScriptError(f"there is no __main__.py in {command[0]!r}; give a .py file, or -m and a module")

    def program() -> None:
        _set_path(folder)
        _run_spec(spec, command)

    return program


def _module(command: Sequence[str]) -> Program:
    if not command:
        raise ScriptError("-m needs the name of a module")
    name = command[0]
    _set_path(os.getcwd())
    if importlib.util.find_spec(name.partition(".")[0] or name) is None:
        raise _no_module(name)

    def program() -> None:
        spec = _spec_of(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _spec_of(f"{name}.__main__")
        if spec is None:
            raise _no_module(name)
        _run_spec(spec, [spec.origin or name, *command[1:]])

    return program


def _spec_of(name: str) -> ModuleSpec | None:
    """Import the parent packages of a module and return its spec; None if there is no such module."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def _no_module(name: str) -> ScriptError:
    return ScriptError(f"there is no module {name!r} on the path; check its name and PYTHONPATH")


def _run_spec(spec: ModuleSpec, argv: Sequence[str]) -> None:
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if code is None:
        raise ScriptError(f"module {spec.name!r} is not written in Python and cannot be run")
    main = _new_main(__file__=spec.origin, __loader__=spec.loader, __cached__=spec.cached, __package__=spec.parent)
    main.__spec__ = spec
    _run(main, code, argv)


def _new_main(**attributes: Any) -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __spec__=None, **{"__cached__": None, **attributes})
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    return main


def _set_path(first: str) -> None:
    """Replace the first entry of sys.path, which is this command's own folder, by `first`."""
    if not sys.flags.safe_path:
        sys.path[0] = first


def _run(main: ModuleType, code: CodeType, argv: Sequence[str]) -> None:
    sys.argv = list(argv)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)
