"""Programs that take a whole epoch before its first step, as in `for batch in list(loader)`.

The doctor's iterator has no end, so such a call would never return and would fill the memory. It is known by the
expression that requests a batch, and then the loader is examined alone.
"""

from __future__ import annotations

import ast
import linecache
import re
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from penstock.core.package_folder import PACKAGE_FOLDER
from penstock.observe.doctor.probes.source_lines import line_text, statements_at
from penstock.observe.doctor.probes.steps.step_calls import NOT_THE_USERS

_COLLECTING = re.compile(r"(list|tuple|sorted)\(")


class EpochCollectedError(BaseException):
    """Ends a program that collects an epoch.

    Args:
        loader: whose batches it collects.
        line: where, with the file's name.
        is_repeated: whether that line is in a loop.
    """

    def __init__(self, loader: DataLoader[Any], line: str, *, is_repeated: bool) -> None:
        super().__init__(line)
        self.loader = loader
        self.line = line
        self.is_repeated = is_repeated


def check_collects(loader: DataLoader[Any], frame: FrameType) -> None:
    """Raise EpochCollectedError if `frame`, which requests a batch, does so to collect all of them."""
    code = frame.f_code
    line, _, column, _ = list(code.co_positions())[frame.f_lasti // 2]
    if line is None or column is None:
        return
    text = linecache.getline(code.co_filename, line).encode()[column:].decode(errors="replace")
    if _COLLECTING.match(text):
        where = line_text(code.co_filename, line)
        raise EpochCollectedError(loader, where, is_repeated=_is_in_a_loop(frame))


def _is_in_a_loop(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith((PACKAGE_FOLDER, *NOT_THE_USERS)):
        line = frame.f_lineno
        around = statements_at(frame.f_code.co_filename, line)
        if any(isinstance(one, ast.For | ast.While) and one.lineno < line for one in around):
            return True
        frame = frame.f_back
    return False
