"""The `penstock` command. Each verb is a class in its own file; the class's docstring is its help text."""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from inspect import getdoc
from typing import NoReturn

from penstock import __version__
from penstock.cli.verb import Verb
from penstock.core.errors import PenstockError
from penstock.core.urls import shown

NAMES = ("run", "watch", "doctor", "tune", "plan", "report", "convert", "inspect")
"""Of the verbs. Each is the class of this name in the module of this name, which is imported when it is asked for: what
all of them import takes longer than many scripts."""


def verbs(*names: str) -> list[Verb]:
    """Return the verbs of these names; all of them without one."""
    return [getattr(import_module(f"penstock.cli.{name}"), name.capitalize())() for name in names or NAMES]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = command_parser(*words[:1]) if words[:1] and words[0] in NAMES else command_parser()
    if not words:
        parser.print_help(sys.stderr)
        return 2
    _suggest_command(parser, words[0])
    args, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse(args.parser, unknown, words)
    if args.verb.name == "run":  # the program handles interrupts and its stdout itself
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


class Parser(argparse.ArgumentParser):
    """A parser whose errors show the words of the command line as all messages show foreign text."""

    def error(self, message: str) -> NoReturn:
        """Print the error, and end."""
        super().error(shown(message))


def command_parser(*names: str) -> argparse.ArgumentParser:
    """Return the parser of the command line, for all verbs or those of these names.

    docs/conf.py makes the reference of the commands from it.
    """
    parser = Parser(
        prog="penstock", description="Faster data loading, memory planning and measurements for PyTorch training."
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for verb in verbs(*names):
        text = getdoc(verb) or ""
        sub = commands.add_parser(
            verb.name,
            help=text.splitlines()[0],
            description=text,
            epilog="\n".join(["examples:", *(f"  {line}\n      {use}" for line, use in verb.examples)]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        verb.add_arguments(sub)
        sub.set_defaults(verb=verb, parser=sub)
    return parser


def _suggest_command(parser: argparse.ArgumentParser, word: str) -> None:
    """End with what was probably meant, if the first word is neither a command nor an option."""
    known = ["--help", "--version", *NAMES]
    if word in [*known, "-h"]:
        return
    if word.endswith(".py"):
        parser.error(f"there is no command {word!r}; did you mean `penstock run {word}`?")
    if meant := difflib.get_close_matches(word, known, 1):
        parser.error(f"there is no {word!r}; did you mean {meant[0]!r}?")


def _refuse(parser: argparse.ArgumentParser, unknown: list[str], words: list[str]) -> NoReturn:
    """End with the words that a command does not take, and the option that the first of them is close to."""
    options = [name for action in parser._actions for name in action.option_strings]
    meant = difflib.get_close_matches(unknown[0], options, 1)
    hint = f"; did you mean {meant[0]}?" if meant else f"; `{parser.prog} --help` lists its arguments"
    script = next((word for word in words if word.endswith(".py")), None)
    if script is not None:
        hint = f"{hint if meant else ''}; put options of {script} itself after it: {parser.prog} {script} {unknown[0]}"
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def _lines_of(error: PenstockError) -> str:
    """Return an error's message; no text of another's begins a line."""
    return shown(str(error)).replace("\n", "\n  ")


def _run_verb(args: argparse.Namespace) -> int:
    """Run the verb; print penstock's own errors in one line, and a lack of torch."""
    try:
        code: int = args.verb.run(args)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from penstock.launch.isolation import isolation_hint  # imports what is seldom needed

        print(f"penstock: {isolation_hint(error)}", file=sys.stderr)
        return 2
    except PenstockError as error:
        print(f"penstock: {_lines_of(error)}", file=sys.stderr)
        return 2
    return code
