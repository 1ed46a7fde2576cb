"""Runs the program in this process, in a session that reports on it.

The process ends as it would under plain Python: `SystemExit`, `KeyboardInterrupt`, threads that outlive the main one
and exit handlers work as usual. The report is an exit handler itself, the first to be registered and so the last to
run.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from penstock.core.errors import OptionError, ScriptError
from penstock.core.ranks import Ranks
from penstock.core.urls import shown
from penstock.launch.isolation import isolation_hint
from penstock.launch.outputs import Outputs
from penstock.launch.patch_torch import TorchPatch, on_torch_import
from penstock.launch.program import load_program, trim_traceback
from penstock.launch.session import Session

if TYPE_CHECKING:
    from penstock.launch.baseline_run import BaselineRun


def run(command: Sequence[str], outputs: Outputs, *, tune: bool = False, baseline: bool = False) -> int:
    """Run a script (`[path, *args]`) or a module (`["-m", name, *args]`) and return its exit code.

    Called once in a process, as the last thing it does: the report is written when the process ends.

    Args:
        command: what is run.
        outputs: what to print and write.
        tune: whether loaders choose their number of workers themselves (see `enable_autoscaling`).
        baseline: whether to run the beginning with torch's own loader first, and compare.

    Raises:
        ScriptError: there is no such script or module.
        SystemExit, KeyboardInterrupt: the program's own.
    """
    program = load_program(command)
    ranks = Ranks.of(os.environ, os.getppid())
    baseline_run = _measure_baseline(command, ranks, quiet=outputs.quiet) if baseline else None
    session = Session(command, outputs.of_rank(ranks), ranks, baseline_run, tune=tune)
    TorchPatch(session).install()
    if baseline_run is not None:
        on_torch_import(baseline_run.install)
    session.begin()
    try:
        program()
    except ScriptError:
        session.discard()
        raise
    except SystemExit as exit_:
        is_code = exit_.code is None or isinstance(exit_.code, int)
        session.exit_code = exit_.code or 0 if is_code else 1  # type: ignore[assignment]
        raise
    except KeyboardInterrupt as interrupt:
        session.exit_code = 128 + signal.SIGINT
        session.error = _print(interrupt)
        _end_interrupted()
    except BaseException as error:  # noqa: BLE001  whatever ends the program ends it here
        session.exit_code = 1
        session.error = _print(error)
        _say(isolation_hint(error), outputs)
    return session.exit_code


def _say(hint: str | None, outputs: Outputs) -> None:
    if hint is not None and not outputs.quiet:
        print(f"penstock: {shown(hint)}", file=sys.stderr, flush=True)


def _measure_baseline(command: Sequence[str], ranks: Ranks, *, quiet: bool) -> BaselineRun:
    if ranks.world_size > 1:
        raise OptionError("--baseline compares one process; leave it out, or run the script once without torchrun")
    from penstock.launch.baseline_run import BaselineRun, announcement  # most runs have none

    if not quiet:
        print(shown(announcement(command)), file=sys.stderr, flush=True)
    baseline_run = BaselineRun(command, quiet=quiet)
    baseline_run.measure_torch()
    return baseline_run


def _print(error: BaseException) -> str:
    """Print what Python prints when `error` ends a program, and return its type and message in one line."""
    error.__traceback__ = trim_traceback(error.__traceback__)
    sys.excepthook(type(error), error, error.__traceback__)
    described = traceback.TracebackException(type(error), error, None)
    described.__notes__ = None  # they would stand after the message
    lines = [*described.format_exception_only()][-1].strip().splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0].strip()} … {lines[-1].strip()}"


def _end_interrupted() -> NoReturn:
    """End by SIGINT after the exit handlers, as Python does after it has printed a KeyboardInterrupt."""
    sys.excepthook = lambda *_: None
    raise KeyboardInterrupt
