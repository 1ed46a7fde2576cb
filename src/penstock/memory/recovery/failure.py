"""A description of one out-of-memory error: what was requested, and where in the user's program.

A `Failure` refers to no frame and no tensor, so keeping it keeps no memory alive.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from penstock.device.oom import requested_nbytes
from penstock.memory.user_lines import is_users, line_text

_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An out-of-memory error, described."""

    text: str
    """The first line of the error's message."""

    requested_nbytes: int | None
    """Bytes of the allocation that failed; None where the message does not contain them."""

    operator: str
    """The function of torch that was running, as far as Python saw it; empty inside the autograd engine."""

    line: str
    """The last line of the user's own code: "file.py:12: x = self.fc(x)"."""

    module: str
    """The class of the innermost module that was running; empty outside forward."""

    in_backward: bool
    """Whether the autograd engine was running."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe `error`; call it while the error still has its traceback."""
        frames = list(_frames(error))
        users = [found for found in frames if is_users(found[0].f_code.co_filename)]
        below = frames[frames.index(users[-1]) + 1 :] if users else frames
        names = [frame.f_code.co_name for frame, _ in below if frame.f_code.co_filename.startswith(_TORCH)]
        modules = [found for frame, _ in frames if isinstance(found := frame.f_locals.get("self"), torch.nn.Module)]
        return cls(
            text=str(error).partition("\n")[0],
            requested_nbytes=requested_nbytes(error),
            operator=next((name for name in reversed(names) if not name.startswith("__torch")), ""),
            line=line_text(users[-1][0].f_code.co_filename, users[-1][1]) if users else "",
            module=type(modules[-1]).__name__ if modules else "",
            in_backward=any(frame.f_code.co_name == "_engine_run_backward" for frame, _ in frames),
        )


@dataclass(slots=True)
class FailureLog:
    """Counts the failures that were survived, and keeps the last."""

    count: int = 0
    last: Failure | None = None

    def record(self, failure: Failure) -> None:
        """Count one more."""
        self.count += 1
        self.last = failure


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "__torch_dispatch__":  # below it are dispatch modes, not the user's program
            return
        yield frame, number
