"""A program as on Windows or macOS: what their Python does not have is absent, for penstock only.

    python other_platform.py windows|macos

torch and the standard library keep everything, because theirs knows the system that it runs on. The program is tested
by `tests/loader/test_other_platforms.py`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import io
import json
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

whole_open = io.open

TYPESHED = Path(find_spec("mypy").origin).parent / "typeshed" / "stdlib"  # type: ignore[union-attr, arg-type]
"""Says which module has which name on which platform."""

PLATFORMS = {"windows": "win32", "macos": "darwin"}
ALSO_ABSENT = {
    "windows": {
        "os": "O_CLOEXEC O_NONBLOCK O_TMPFILE O_DIRECT",
        "socket": "AF_UNIX SOCK_SEQPACKET MSG_NOSIGNAL MSG_DONTWAIT CMSG_SPACE",
    },
    "macos": {"os": "O_TMPFILE O_DIRECT", "socket": "MSG_NOSIGNAL"},
}
"""Names that typeshed has for all platforms, or does not know by platform."""


def names_on(sys_platform: str, statements: list[ast.stmt], *, imported: bool = True) -> set[str]:
    """Return the names that a stub's statements define on a platform; without `imported`, those of its own."""
    names = set[str]()
    for statement in statements:
        match statement:
            case ast.If():
                system = types.SimpleNamespace(platform=sys_platform, version_info=sys.version_info)
                is_so = eval(compile(ast.Expression(statement.test), "stub", "eval"), {"sys": system})
                names |= names_on(sys_platform, statement.body if is_so else statement.orelse, imported=imported)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
            case ast.ImportFrom(names=aliases) if imported:
                names |= {alias.asname or alias.name for alias in aliases}
    return names


@functools.cache
def absent_names(module: str, platform: str) -> set[str] | None:
    """Return the names of a module of the standard library that a platform lacks; None if it lacks the module."""
    path = TYPESHED / module.replace(".", "/")
    stub = path / "__init__.pyi" if path.is_dir() else path.with_suffix(".pyi")
    if not stub.exists():  # not of the standard library
        return set()
    with whole_open(stub) as file:
        statements = ast.parse(file.read()).body
    here, there = (names_on(system, statements) for system in ("linux", PLATFORMS[platform]))
    own_here, own_there = (
        any(not name.startswith("_") for name in names_on(system, statements, imported=False))
        for system in ("linux", PLATFORMS[platform])
    )
    if own_here and not own_there:
        return None
    return {*(here - there), *ALSO_ABSENT[platform].get(module, "").split()}


class Without(ModuleType):
    """A module without some of its names."""

    def __init__(self, whole: ModuleType, absent: set[str]) -> None:
        super().__init__(whole.__name__)
        self.__dict__["_whole"], self.__dict__["_absent"] = whole, absent

    def __getattr__(self, name: str) -> Any:
        if name in self._absent:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on this platform")
        return getattr(self._whole, name)


def take_away(platform: str) -> None:
    """Have every module of penstock see the standard library of `platform`, and no /proc."""
    whole_import = builtins.__import__

    @functools.cache
    def seen_there(name: str) -> ModuleType:
        absent = absent_names(name, platform)
        if absent is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        whole = importlib.import_module(name)
        return Without(whole, absent) if absent else whole

    def import_there(name: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        module = whole_import(name, globals_, locals_, fromlist, level)
        is_own = str((globals_ or {}).get("__name__", "")).startswith("penstock")
        if not is_own or level or name.partition(".")[0] not in sys.stdlib_module_names:
            return module
        there = seen_there(name)
        return there if fromlist or "." not in name else seen_there(module.__name__)

    def open_there(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file).startswith(("/proc", "/sys", "/dev/shm")):
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return whole_open(file, *arguments, **options)

    for name in [name for name in sys.modules if name.partition(".")[0] == "penstock"]:
        del sys.modules[name]  # imported already where tests preload it
    builtins.__import__ = import_there
    io.open = builtins.open = open_there


if __name__ in ("__main__", "__mp_main__"):  # in its worker process, too
    import torch.utils.data

    take_away(sys.argv[1])

import penstock  # noqa: E402
from penstock import DataLoader  # noqa: E402


def refusal(**arguments: Any) -> str:
    """Return what a loader with worker processes says to these arguments."""
    try:
        loader = DataLoader(range(8), 4, num_workers=1, **arguments)
        iter(loader)
    except penstock.OptionError as error:
        return str(error)
    return "not refused"


def main() -> None:
    """Load in every way that there is, and print what came."""
    from penstock import cli

    data = torch.utils.data.TensorDataset(torch.arange(10.0))
    found: dict[str, Any] = {}
    for name, options in {
        "inline": {},
        "large": {"collate_fn": lambda samples: torch.full((1 << 20,), samples[0][0])},
        "threads": {"num_workers": 2, "worker_type": "thread"},
    }.items():
        loader = DataLoader(data, 4, seed=1, **options)
        batches = [torch.as_tensor(batch[0] if isinstance(batch, list) else batch[:4]) for batch in loader]
        found[name] = [batch.tolist() for batch in batches]
        loader.state_dict()
    loader = DataLoader(data, 4, num_workers=1, multiprocessing_context="spawn")
    batches = iter(loader)
    found["iterator"] = type(batches).__module__
    found["workers"] = [batch[0].tolist() for batch in batches]
    found["reason"] = loader.statistics().fallback_reason
    found["refused"] = {
        name: refusal(**{name: value}) for name, value in {"seed": 3, "errors": "skip", "device": "sim"}.items()
    }
    try:
        loader.state_dict()
    except penstock.StateError as error:
        found["state"] = str(error)
    try:
        cli.main(["--help"])
    except SystemExit as end:
        found["help"] = end.code
    print(json.dumps(found))


if __name__ == "__main__":
    main()
