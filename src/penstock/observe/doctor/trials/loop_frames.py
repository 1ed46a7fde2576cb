"""Which code of a program requests a batch: a loop, a single look, or one call that collects them all."""

from __future__ import annotations

import ast
import dis
import linecache
import re
from collections.abc import Iterator
from types import FrameType

from penstock.core.package_folder import PACKAGE_FOLDER
from penstock.observe.doctor.probes.source_lines import Function, extent, statements_at
from penstock.observe.doctor.probes.steps.step_calls import NOT_THE_USERS

_OPTIMIZES = re.compile(r"optim", re.IGNORECASE)
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def is_in_for(frame: FrameType) -> bool:
    """Return whether a `for` asks for the next item, itself or through an iterator of C such as `enumerate`'s."""
    return frame.f_lasti >= 0 and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "FOR_ITER"


def requesting_text(frame: FrameType) -> str:
    """Return the line that requests a batch, from the expression on that does so; empty where it is not known."""
    code = frame.f_code
    line, _, column, _ = list(code.co_positions())[frame.f_lasti // 2]
    if line is None or column is None:
        return ""
    return linecache.getline(code.co_filename, line).encode()[column:].decode(errors="replace")


def is_single_look(frame: FrameType) -> bool:
    """Return whether a program takes one batch and goes on, as with `next(iter(loader))` that is in no loop."""
    return requesting_text(frame).startswith("next(") and not is_in_a_loop(frame)


def is_in_a_loop(frame: FrameType | None) -> bool:
    """Return whether a loop is around the line that `frame` runs, or around that of a function that called it."""
    return any(_has_loop_around(one) for one in frames_of_program(frame))


def goes_on_to_optimize(frame: FrameType) -> bool:
    """Return whether the functions that are running mention an optimizer below the lines where they are now."""
    return any(_OPTIMIZES.search(line) for one in users_frames(frame) for line in _lines_below(one))


def users_frames(frame: FrameType | None) -> list[FrameType]:
    """Return those of `frames_of_program` that run code which was written for the program."""
    return [one for one in frames_of_program(frame) if not one.f_code.co_filename.startswith(NOT_THE_USERS)]


def _lines_below(frame: FrameType) -> list[str]:
    """Return what follows in the function, or the module, that `frame` runs."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    functions = [one for one in statements_at(file, line) if isinstance(one, Function)]
    return linecache.getlines(file)[line : extent(functions[0]).stop - 1 if functions else None]


def frames_of_program(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the functions of a program that run, innermost first, from the one that requests a batch of the doctor."""
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
        frame = frame.f_back
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
        yield frame
        frame = frame.f_back


def _has_loop_around(frame: FrameType) -> bool:
    line = frame.f_lineno
    around = statements_at(frame.f_code.co_filename, line)
    if any(isinstance(one, ast.For | ast.AsyncFor | ast.While) and one.lineno < line for one in around):
        return True
    return bool(around) and any(isinstance(node, _COMPREHENSIONS) for node in ast.walk(around[0]))
