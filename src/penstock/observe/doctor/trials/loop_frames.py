"""Which code of a program requests a batch: a loop, a single look, or one call that collects them all."""

from __future__ import annotations

import ast
import dis
import itertools
import linecache
import re
from collections.abc import Iterator
from types import FrameType

from penstock.core.package_folder import PACKAGE_FOLDER
from penstock.core.user_code import is_users
from penstock.observe.doctor.trials.statements import Function, extent, statements_at

_OPTIMIZES = re.compile(r"optim", re.IGNORECASE)
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def is_in_for(frame: FrameType) -> bool:
    """Return whether a `for` or `yield from` asks for the next item, or an iterator of C in one, as `enumerate`'s."""
    return frame.f_lasti >= 0 and dis.opname[frame.f_code.co_code[frame.f_lasti]] in ("FOR_ITER", "SEND")


def requesting_text(frame: FrameType) -> str:
    """Return the line that requests a batch, from the expression on that does so; empty where it is not known."""
    place = _place_of(frame)
    if place is None:
        return ""
    return linecache.getline(frame.f_code.co_filename, place[0]).encode()[place[1] :].decode(errors="replace")


def is_single_look(frame: FrameType) -> bool:
    """Return whether a program takes one batch and goes on: `next(iter(loader))`, or a `for` that ends with `break`."""
    is_one = _breaks_at_once(frame) if is_in_for(frame) else requesting_text(frame).startswith("next(")
    return is_one and not is_in_a_loop(frame)


def is_in_a_loop(frame: FrameType | None) -> bool:
    """Return whether a loop is around the line that `frame` runs, or around that of a function that called it."""
    frames = [*frames_of_program(frame)]
    # One batch for each item of a `for`, as with `map`; that of a generator and the one that takes its items are one.
    is_called_by_for = not any(map(is_in_for, frames[:1])) and any(map(is_in_for, frames[1:]))
    return is_called_by_for or any(_has_loop_around(one) for one in frames)


def goes_on_to_optimize(frame: FrameType) -> bool:
    """Return whether the functions that are running mention an optimizer below the lines where they are now."""
    return any(_OPTIMIZES.search(line) for one in users_frames(frame) for line in _lines_below(one))


def users_frames(frame: FrameType | None) -> list[FrameType]:
    """Return those of `frames_of_program` that run code which was written for the program."""
    return [one for one in frames_of_program(frame) if is_users(one.f_code.co_filename)]


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
    around = statements_at(frame.f_code.co_filename, frame.f_lineno)
    place = _place_of(frame) or (frame.f_lineno, 0)
    if any(place >= repeated for one in around if (repeated := _repeated_from(one)) is not None):
        return True
    return bool(around) and any(isinstance(node, _COMPREHENSIONS) for node in ast.walk(around[0]))


def _repeated_from(statement: ast.stmt) -> tuple[int, int] | None:
    """Return where what a loop runs again and again begins; None for other statements."""
    if isinstance(statement, ast.While):
        return statement.test.lineno, statement.test.col_offset
    if isinstance(statement, ast.For | ast.AsyncFor):
        return statement.body[0].lineno, statement.body[0].col_offset
    return None


def _breaks_at_once(frame: FrameType) -> bool:
    """Return whether the `for` that `frame` is in ends with `break` when it has run once."""
    place = _place_of(frame)
    loops = [one for one in statements_at(frame.f_code.co_filename, frame.f_lineno) if isinstance(one, ast.For)]
    own = [one for one in loops if place == (one.iter.lineno, one.iter.col_offset)]
    return any(isinstance(own[0].body[-1], ast.Break) for _ in own[:1]) and not _continues(own[0])


def _continues(loop: ast.For) -> bool:
    return any(isinstance(node, ast.Continue) for node in ast.walk(loop))


def _place_of(frame: FrameType) -> tuple[int, int] | None:
    """Return the line and the column (in bytes) of the expression that `frame` evaluates."""
    line, _, column, _ = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    return None if line is None or column is None else (line, column)
