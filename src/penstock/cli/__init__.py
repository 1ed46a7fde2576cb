"""The `penstock` command. Each verb is a class in its own file; the class's docstring is its help text."""

from __future__ import annotations

import argparse
import difflib
import errno
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
from penstock.launch.isolation import isolation_hint

VERBS: tuple[Verb, ...] = (Run(), Watch(), Doctor(), Tune(), Plan(), Report(), Convert(), Inspect())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name) and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="penstock", description="Faster data loading, memory planning and measurements for PyTorch training."
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for verb in VERBS:
        text = getdoc(verb) or ""
        sub = verbs.add_parser(
            verb.name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        verb.add_arguments(sub)
        sub.set_defaults(verb=verb)
    words = list(sys.argv[1:] if argv is None else argv)
    _suggest(parser, words)
    args = parser.parse_args(words)
    if isinstance(args.verb, Run):  # the program handles interrupts and its stdout itself
        return _run_verb(args)
    try:
        code = _run_verb(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("penstock: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader has closed the pipe; devnull keeps Python from flushing into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        print(f"penstock: the output cannot be written: {os.strerror(errno.ENOSPC)}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _suggest(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """End with what was probably meant, if the first word is neither a command nor an option."""
    known = ["--help", "--version", *(verb.name for verb in VERBS)]
    if words and words[0] not in [*known, "-h"] and (meant := difflib.get_close_matches(words[0], known, 1)):
        parser.error(f"there is no {words[0]!r}; did you mean {meant[0]!r}?")


def _run_verb(args: argparse.Namespace) -> int:
    """Run the verb; print penstock's own errors in one line, and a lack of torch."""
    try:
        code: int = args.verb.run(args)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(f"penstock: {isolation_hint(error)}", file=sys.stderr)
        return 2
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    return code
