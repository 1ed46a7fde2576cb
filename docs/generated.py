"""The parts of the site that are made from the code, so that they cannot fall behind it: commands, formats, links."""

from __future__ import annotations

import argparse
import inspect
import pathlib
import re
from collections.abc import Callable, Iterator

import penstock
from penstock.cli import command_parser
from penstock.data.format_registry import FORMATS

MARK = "<!-- formats: what follows is made by `python docs/generated.py` -->"

_ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)


def commands() -> str:
    """Return a section for each command: its usage, its help, and its arguments, each of which can be linked to."""
    parser = command_parser()
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return "\n".join(_command(f"penstock {name}", each) for name, each in verbs.choices.items())


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    lines = [
        f"## {name}",
        "",
        _options_as_code(parser.description or ""),
        "",
        "```{eval-rst}",
        f".. program:: {name}",
        "",
    ]
    lines += [".. code-block:: text", "", *(f"   {line}" for line in parser.format_usage().splitlines()), ""]
    lines += [".. code-block:: text", "", *(f"   {line}".rstrip() for line in (parser.epilog or "").splitlines()), ""]
    for action in parser._actions:
        if "--help" in action.option_strings:
            continue
        placeholder = action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else action.dest.upper())
        value = "" if action.nargs == 0 else f" {placeholder}"
        signature = ", ".join(f"{option}{value}" for option in action.option_strings) or placeholder
        words = _options_as_code((action.help or "").replace("%(default)s", str(action.default)))
        lines += [f".. option:: {signature}", "", f"   {words[:1].upper()}{words[1:]}.", ""]
    return "\n".join([*lines, "```", ""])


def _options_as_code(text: str) -> str:
    """Return the text with its options in backticks: `--` is made a dash elsewhere."""
    return re.sub(r"`[^`]*`|--[a-z][a-z-]*", lambda found: found[0] if found[0][0] == "`" else f"`{found[0]}`", text)


def format_options() -> str:
    """Return a section for each format: its suffixes, and a table of what reads and what writes it takes."""
    sections = []
    for each in FORMATS:
        sections += [f"## {each.name}", "", f"Names that end in {', '.join(f'`{one}`' for one in each.suffixes)}.", ""]
        for title, function in (("`penstock.open`", each.open_files), ("`penstock.convert`", each.writer)):
            if function is not None and (
                rows := [f"| `{name}={value}` | {text} |" for name, value, text in _own(function)]
            ):
                sections += [f"| option of {title} | what it does |", "|---|---|", *rows, ""]
    return "\n".join(sections)


def write_formats() -> None:
    """Write the options of each format into their page."""
    page = pathlib.Path(__file__).parent / "formats.md"
    head = page.read_text(encoding="utf-8").partition(MARK)[0]
    page.write_text(head + MARK + "\n\n" + format_options(), encoding="utf-8")


def _own(function: Callable[..., object]) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the default and the description of each keyword-only argument."""
    documented = getattr(function, "func", function)  # of a functools.partial
    documents = getattr(documented, "__mro__", [documented])[::-1]  # of a class, also what it inherits
    described = dict(_ARGUMENT.findall("\n".join(inspect.getdoc(one) or "" for one in documents)))
    for one in inspect.signature(function).parameters.values():
        if one.kind is inspect.Parameter.KEYWORD_ONLY:
            default = "" if one.default is inspect.Parameter.empty else repr(one.default)
            yield one.name, default, " ".join(described[one.name].split()).replace("|", "\\|")


def named_object(code: str) -> str | None:
    """Return what a piece of code in a sentence is about: "penstock.open" or "penstock run"; None for others.

    Names that torch or Python has as well count only where they are written as `penstock.open`.
    """
    if found := re.match(r"(?:\$ )?(penstock [a-z]+)\b", code):
        return found[1]
    found = re.fullmatch(r"(penstock\.|loader\.)?(\w+)((?:\.\w+)?)(?:\(.*\))?", code, re.DOTALL)
    if found is None:
        return None
    owner, name, attribute = found.groups()
    if owner == "loader.":
        return f"penstock.DataLoader.{name}"
    is_ours = owner == "penstock." or (name[0].isupper() and name not in ("DataLoader", "Source", "Stream"))
    return f"penstock.{name}{attribute}" if is_ours and name in penstock.__all__ else None


if __name__ == "__main__":
    write_formats()
