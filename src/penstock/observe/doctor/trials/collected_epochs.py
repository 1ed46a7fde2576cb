"""Programs that take a whole epoch before its first step, as in `for batch in list(loader)`.

The doctor's iterator has no end, so such a call would never return and would fill the memory. It is known by the
expression that requests a batch, and then the loader is examined alone.
"""

from __future__ import annotations

import re
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from penstock.core.user_code import line_text
from penstock.observe.doctor.trials.loop_frames import requesting_text

_COLLECTING = re.compile(r"(list|tuple|sorted)\(")


class EpochCollectedError(BaseException):
    """Ends a program that collects an epoch.

    Args:
        loader: whose batches it collects.
        line: where, with the file's name.
    """

    def __init__(self, loader: DataLoader[Any], line: str) -> None:
        super().__init__(line)
        self.loader = loader
        self.line = line


def check_collects(loader: DataLoader[Any], frame: FrameType) -> None:
    """Raise EpochCollectedError if `frame`, which requests a batch, does so to collect all of them."""
    if _COLLECTING.match(requesting_text(frame)):
        where = line_text(frame.f_code.co_filename, frame.f_lineno)
        raise EpochCollectedError(loader, where)
