"""One run: the program, the live line while it runs, the report and run.json when its process ends.

The program runs in this process, and the process ends as it would have under Python: `SystemExit`,
`KeyboardInterrupt`, threads that outlive the main one and exit handlers all take their ordinary way. The report is
itself an exit handler, the first to be registered and so the last to be called.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from penstock import __version__
from penstock.core.errors import ScriptError
from penstock.core.host import usable_cores
from penstock.launch.outputs import Outputs
from penstock.launch.program import own_traceback, program_of
from penstock.launch.substitute import replace_torch_loader
from penstock.observe import report
from penstock.observe.clock import read_clock
from penstock.observe.diagnose import findings_of_run
from penstock.observe.host_memory import MemoryMeter
from penstock.observe.live import LiveView
from penstock.observe.machine import machine
from penstock.observe.record import RunRecord
from penstock.observe.watch import Watch

if TYPE_CHECKING:
    from penstock.feed.loader import DataLoader
    from penstock.observe.prometheus import Endpoint


_INTERRUPTED = 128 + signal.SIGINT


def run(command: Sequence[str], outputs: Outputs, *, quiet: bool = False, tune: bool = False) -> int:
    """Run a script (`[path, *args]`) or a module (`["-m", name, *args]`) and return its exit code.

    With `tune`, its loaders find their number of workers by themselves (see `feed.loader.make_auto`).

    To be called once in a process, as the last thing it does: the report comes when the process ends.

    Raises:
        ScriptError: there is no such script or module.
        SystemExit, KeyboardInterrupt: the program's own.
    """
    program = program_of(command)
    session = _Session(command, outputs.of_rank(os.environ), quiet=quiet, tune=tune)
    replace_torch_loader(session.notice)
    session.begin()
    try:
        program()
    except ScriptError:
        session.forget()
        raise
    except SystemExit as exit_:
        no_failure = exit_.code is None or isinstance(exit_.code, int)
        session.exit_code = exit_.code or 0 if no_failure else 1  # type: ignore[assignment]
        raise
    except KeyboardInterrupt as interrupt:
        session.exit_code = _INTERRUPTED
        session.error = _print(interrupt)
        _be_interrupted()
    except BaseException as error:  # noqa: BLE001  whatever ends the program ends it here
        session.exit_code = 1
        session.error = _print(error)
    return session.exit_code


class _Session:
    """What a run keeps until its end."""

    def __init__(self, command: Sequence[str], outputs: Outputs, *, quiet: bool, tune: bool = False) -> None:
        self._command = tuple(command)
        self._outputs = outputs
        self._quiet = quiet
        self._tune = tune
        self._watch = Watch(traced=outputs.trace_file is not None)
        self._endpoint = _endpoint(self._watch, outputs.prometheus_port, quiet=quiet)
        self._memory = MemoryMeter()
        self._view = LiveView(self._watch, self._memory, quiet=quiet)
        self.exit_code = 0
        self.error: str | None = None

    def begin(self) -> None:
        """Start the clock."""
        self._pid = os.getpid()
        self._started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._began = time.perf_counter()
        self._clock = read_clock()
        atexit.register(self._end)

    def notice(self, loader: DataLoader[Any]) -> None:
        """Watch a loader that the program has made."""
        if os.getpid() == self._pid:  # else this is a child that the program has forked
            if self._tune:
                from penstock.feed.loader import make_auto  # the program has imported torch by now

                make_auto(loader)
            self._watch.notice(loader)
            self._view.start()
            if self._endpoint is not None:
                self._endpoint.start()

    def forget(self) -> None:
        """Report nothing: there was no program."""
        atexit.unregister(self._end)
        if self._endpoint is not None:
            self._endpoint.close()

    def _end(self) -> None:
        if os.getpid() != self._pid:
            return
        self._view.stop()
        if self._endpoint is not None:
            self._endpoint.close()
        self._memory.look()
        record = RunRecord(
            command=self._command,
            started=self._started,
            began_unix_ns=self._clock.unix_ns,
            wall_s=time.perf_counter() - self._began,
            exit_code=self.exit_code,
            error=self.error,
            versions={"penstock": __version__, "python": platform.python_version(), "torch": _torch_version()},
            cpus=usable_cores(),
            machine=machine(),
            memory=self._memory.peak(),
            loaders=tuple(loader.record() for loader in self._watch.loaders),
        )
        record = replace(record, findings=findings_of_run(record))
        if not self._quiet:
            sys.stdout.flush()
            print(report.render(record), end="", file=sys.stderr, flush=True)
        self._outputs.write(record, self._watch, self._clock)
        if self.exit_code == _INTERRUPTED:
            _stay_interrupted()


def _endpoint(watch: Watch, port: int | None, *, quiet: bool) -> Endpoint | None:
    """Take the port, if there is to be one; import what serves it only then."""
    if port is None:
        return None
    from penstock.observe.prometheus import Endpoint

    endpoint = Endpoint(watch, port)
    if not quiet:
        print(f"penstock: live numbers at http://127.0.0.1:{endpoint.port}/metrics", file=sys.stderr)
    return endpoint


def _print(error: BaseException) -> str:
    """Print what Python prints when `error` ends a program, and return it in one line."""
    error.__traceback__ = own_traceback(error.__traceback__)
    sys.excepthook(type(error), error, error.__traceback__)
    return traceback.format_exception_only(error)[-1].strip()


def _be_interrupted() -> NoReturn:
    """End by SIGINT after the exit handlers, as Python does after a KeyboardInterrupt that it has printed."""
    sys.excepthook = lambda *_: None
    raise KeyboardInterrupt


def _stay_interrupted() -> None:
    """Let Python still end by SIGINT after exit handlers that have imported something.

    It remembers an unhandled KeyboardInterrupt in a flag that every `exec` of a string clears or sets, and making a
    dataclass or a named tuple is one. Source: `run_eval_code_obj` in CPython's pythonrun.c.
    """
    with contextlib.suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")


def _torch_version() -> str | None:
    torch = sys.modules.get("torch")
    return str(torch.__version__) if torch is not None else None
