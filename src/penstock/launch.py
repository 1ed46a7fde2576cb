"""`penstock run`: a training script, unedited, with penstock's DataLoader in place of torch's.

The script runs in this process as `python script` would run it: as `__main__`, with its own argv and path, the same
traceback, the same exit code. What is different: before its first line, `torch.utils.data.DataLoader` is penstock's.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import io
import os
import platform
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from penstock import __version__
from penstock.core.errors import ScriptError
from penstock.core.host import usable_cores
from penstock.observe import report
from penstock.observe.host_memory import MemoryMeter
from penstock.observe.live import LiveView
from penstock.observe.record import RunRecord, save
from penstock.observe.watch import Watch


def run(command: Sequence[str], *, json_file: Path | None, quiet: bool = False) -> int:
    """Run a script (`[path, *args]`) or a module (`["-m", name, *args]`), report, and return its exit code.

    Does not return when the program was interrupted: this process then ends by SIGINT, as the program would have.

    Raises:
        ScriptError: there is no such script or module.
    """
    program = _module(command[1:]) if command[0] == "-m" else _script(command)
    replace_torch_loader()
    watch, memory = Watch(), MemoryMeter()
    view = LiveView(watch, memory, quiet=quiet)
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    began = time.perf_counter()
    watch.start()
    view.start()
    try:
        exit_code, error = _outcome(program)
    finally:
        view.stop()
        watch.stop()
    memory.look()
    record = RunRecord(
        command=tuple(command),
        started=started,
        wall_s=time.perf_counter() - began,
        exit_code=exit_code,
        error=error,
        versions={"penstock": __version__, "python": platform.python_version(), "torch": _torch_version()},
        cpus=usable_cores(),
        memory=memory.peak(),
        loaders=tuple(loader.record() for loader in watch.loaders),
    )
    if json_file is not None:
        save(record, json_file)
    if not quiet:
        sys.stdout.flush()
        print(report.render(record), end="", file=sys.stderr, flush=True)
    if exit_code == 128 + signal.SIGINT and error == "KeyboardInterrupt":
        _die_of_interrupt()
    return exit_code


def replace_torch_loader() -> None:
    """Make penstock's the DataLoader that `from torch.utils.data import DataLoader` gives from now on."""
    data = importlib.import_module("torch.utils.data")
    from penstock.feed.loader import DataLoader

    for module in (data, importlib.import_module("torch.utils.data.dataloader")):
        module.DataLoader = DataLoader  # type: ignore[attr-defined]


def _script(command: Sequence[str]) -> Callable[[], None]:
    path = Path(command[0])
    if not path.is_file():
        raise ScriptError(
            f"there is no script {command[0]!r} in {Path.cwd().name}/; give a .py file, or -m and a module"
        )
    file = os.path.abspath(path)  # as Python itself names it, in tracebacks too
    with io.open_code(file) as stream:
        source = stream.read()

    def program() -> None:
        main = ModuleType("__main__")
        main.__file__ = file
        main.__builtins__ = __builtins__  # type: ignore[attr-defined]
        main.__spec__ = None
        sys.argv = list(command)
        sys.path[0] = str(path.resolve().parent)
        sys.modules["__main__"] = main
        exec(compile(source, file, "exec"), main.__dict__)

    return program


def _module(command: Sequence[str]) -> Callable[[], None]:
    if not command:
        raise ScriptError("-m needs the name of a module")
    sys.path[0] = os.getcwd()
    try:
        found = importlib.util.find_spec(command[0])
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ScriptError(f"there is no module {command[0]!r} on the path; look at its name, or at PYTHONPATH")

    def program() -> None:
        sys.argv = list(command)
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)

    return program


def _outcome(program: Callable[[], None]) -> tuple[int, str | None]:
    """Run `program`; return its exit code and what ended it, having printed what Python would print."""
    try:
        program()
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return exit_.code or 0, None
        print(exit_.code, file=sys.stderr)
        return 1, None
    except BaseException as error:
        error.__traceback__ = _without_launcher(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        words = traceback.format_exception_only(error)[-1].strip()
        return (128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1), words
    return 0, None


def _without_launcher(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the program's own first frame on."""
    launcher = {__file__, runpy.__file__, "<frozen runpy>"}
    kept = trace
    while kept is not None and kept.tb_frame.f_code.co_filename in launcher:
        kept = kept.tb_next
    return kept


def _torch_version() -> str | None:
    torch = sys.modules.get("torch")
    return str(torch.__version__) if torch is not None else None


def _die_of_interrupt() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(128 + signal.SIGINT)
