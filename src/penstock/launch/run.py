"""One run: the program in this process, and everything that is kept of it.

The program runs in this process, and the process ends as it would have under Python: `SystemExit`,
`KeyboardInterrupt`, threads that outlive the main one and exit handlers all take their ordinary way. The report is
itself an exit handler, the first to be registered and so the last to be called.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from penstock.core.errors import OptionError, ScriptError
from penstock.core.ranks import Ranks
from penstock.launch.compare import Comparison, announcement
from penstock.launch.outputs import Outputs
from penstock.launch.program import own_traceback, program_of
from penstock.launch.session import Session
from penstock.launch.substitute import after_torch, replace_torch_loader


def run(
    command: Sequence[str], outputs: Outputs, *, tune: bool = False, baseline: bool = False, distributed: bool = False
) -> int:
    """Run a script (`[path, *args]`) or a module (`["-m", name, *args]`) and return its exit code.

    To be called once in a process, as the last thing it does: the report comes when the process ends.

    Args:
        command: what is run.
        outputs: what is printed and written of it.
        tune: whether its loaders find their number of workers by themselves (see `feed.loader.make_auto`).
        baseline: whether to run its beginning with torch's own loader before, and compare.
        distributed: whether its plain loaders share out their samples over ranks (see `sharing`).

    Raises:
        ScriptError: there is no such script or module.
        SystemExit, KeyboardInterrupt: the program's own.
    """
    program = program_of(command)
    ranks = Ranks.of(os.environ, os.getppid())
    comparison = _compared(command, ranks, quiet=outputs.quiet) if baseline else None
    session = Session(command, outputs.of_rank(ranks), ranks, comparison, tune=tune)
    replace_torch_loader(session.notice, distributed=distributed)
    if comparison is not None:
        after_torch(comparison.install)
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
        session.exit_code = 128 + signal.SIGINT
        session.error = _print(interrupt)
        _be_interrupted()
    except BaseException as error:  # noqa: BLE001  whatever ends the program ends it here
        session.exit_code = 1
        session.error = _print(error)
    return session.exit_code


def _compared(command: Sequence[str], ranks: Ranks, *, quiet: bool) -> Comparison:
    if ranks.world_size > 1:
        raise OptionError("--baseline compares one process; leave it out, or run the script without torchrun once")
    if not quiet:
        print(announcement(command), file=sys.stderr, flush=True)
    comparison = Comparison(command)
    comparison.measure_torch()
    return comparison


def _print(error: BaseException) -> str:
    """Print what Python prints when `error` ends a program, and return it in one line."""
    error.__traceback__ = own_traceback(error.__traceback__)
    sys.excepthook(type(error), error, error.__traceback__)
    return traceback.format_exception_only(error)[-1].strip()


def _be_interrupted() -> NoReturn:
    """End by SIGINT after the exit handlers, as Python does after a KeyboardInterrupt that it has printed."""
    sys.excepthook = lambda *_: None
    raise KeyboardInterrupt
