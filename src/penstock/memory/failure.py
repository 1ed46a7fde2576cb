"""Surviving one out-of-memory: what it was is written down, and everything that it kept alive is let go.

The frames of a traceback keep the tensors of the failed attempt. As long as the exception is being handled they
cannot be freed. So inside `except` the failure is only noted; afterwards the frames are cleared, over the whole chain
of causes and contexts, what refers to itself is collected, and the cached blocks go back to the driver.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Generic, TypeVar

import torch

from penstock.device.oom import is_out_of_memory, requested_nbytes
from penstock.memory.lines import is_users, line_text

T = TypeVar("T")

TRIES = 6
"""Failures of one thing, one after the other, before giving up."""

_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An out-of-memory, in words: nothing of it keeps memory alive."""

    text: str
    """The message of the error."""

    requested: int | None
    """Bytes of the allocation that failed, where the message says so."""

    operator: str
    """The function of torch's that was running, as far as Python saw it; empty inside the autograd engine."""

    line: str
    """The last line of the user's own code: "file.py:12: x = self.fc(x)"."""

    module: str
    """The innermost module that was running, by class; empty outside of forward."""

    in_backward: bool
    """Whether the autograd engine was running."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Write down `error`."""
        frames = list(_frames(error))
        users = [found for found in frames if is_users(found[0].f_code.co_filename)]
        below = frames[frames.index(users[-1]) + 1 :] if users else frames
        names = [frame.f_code.co_name for frame, _ in below if frame.f_code.co_filename.startswith(_TORCH)]
        modules = [found for frame, _ in frames if isinstance(found := frame.f_locals.get("self"), torch.nn.Module)]
        return cls(
            text=str(error).partition("\n")[0],
            requested=requested_nbytes(error),
            operator=next((name for name in reversed(names) if not name.startswith("__torch")), ""),
            line=line_text(users[-1][0].f_code.co_filename, users[-1][1]) if users else "",
            module=type(modules[-1]).__name__ if modules else "",
            in_backward=any(frame.f_code.co_name == "_engine_run_backward" for frame, _ in frames),
        )


@dataclass(slots=True)
class FailureLog:
    """What was survived."""

    count: int = 0
    last: Failure | None = None

    def note(self, failure: Failure) -> None:
        """Take note of one more."""
        self.count += 1
        self.last = failure


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What came of an attempt: a value, or the failure in place of it."""

    value: T | None = None
    failure: Failure | None = None


def attempt(body: Callable[[], T]) -> Outcome[T]:
    """Run `body`. An out-of-memory inside is returned, and what it held is free again; other errors are raised.

    >>> attempt(lambda: 1 + 1).value
    2
    """
    try:
        return Outcome(value=body())
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = Failure.of(error)
        caught = error
    let_go(caught)
    del caught
    collect()
    return Outcome(failure=failure)


def insist(body: Callable[[], object], log: FailureLog | None = None) -> Failure | None:
    """Do what takes little memory and may be begun again, until it succeeds; return the failure if it never does."""
    failure = None
    for _ in range(TRIES):
        failure = attempt(body).failure
        if failure is None:
            return None
        if log is not None:
            log.note(failure)
    return failure


def let_go(error: BaseException) -> None:
    """Clear the finished frames of `error` and of all its causes and contexts."""
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


def collect() -> None:
    """Free what refers to itself, and give cached device memory back to the driver."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        torch.accelerator.memory.empty_cache()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        todo += [one.__cause__, one.__context__]


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "__torch_dispatch__":  # below are modes, not the program
            return
        yield frame, number
