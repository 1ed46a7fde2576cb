"""The `penstock` command. Each verb is a class in a file of its own: its docstring is its help."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from inspect import getdoc

from penstock import __version__
from penstock.cli.convert import Convert
from penstock.cli.doctor import Doctor
from penstock.cli.inspect import Inspect
from penstock.cli.plan import Plan
from penstock.cli.report import Report
from penstock.cli.run import Run
from penstock.cli.tune import Tune
from penstock.cli.verb import Verb
from penstock.cli.watch import Watch
from penstock.core.errors import PenstockError

VERBS: tuple[Verb, ...] = (Run(), Watch(), Doctor(), Tune(), Plan(), Report(), Convert(), Inspect())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name) and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="penstock", description="Feed a PyTorch program at the speed of its machine, and fit it into its memory."
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    for verb in VERBS:
        text = getdoc(verb) or ""
        sub = verbs.add_parser(
            verb.name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        verb.options(sub)
        sub.set_defaults(verb=verb)
    args = parser.parse_args(argv)
    if isinstance(args.verb, Run):  # whose program has its own way with interrupts, and with its stdout
        return _told(args)
    try:
        code = _told(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("penstock: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read this has read enough; Python is not to flush it again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _told(args: argparse.Namespace) -> int:
    """Run the verb; what is wrong is told in a line."""
    try:
        code: int = args.verb.run(args)
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    return code
