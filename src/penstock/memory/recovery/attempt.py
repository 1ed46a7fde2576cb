"""Attempt something that may run out of memory, free what a failed attempt held, and retry.

The frames of a traceback keep the tensors of the failed attempt alive, and they cannot be freed while the exception is
being handled. So `except` only describes the failure. Afterwards the frames are cleared over the whole chain of causes
and contexts, reference cycles are collected, and cached device blocks go back to the driver.
"""

from __future__ import annotations

import functools
import gc
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from penstock.device.oom import is_out_of_memory
from penstock.memory.recovery.failure import Failure, FailureLog

T = TypeVar("T")

MAX_TRIES = 6
"""Consecutive failures of one thing before giving up."""


class AttemptResult(NamedTuple, Generic[T]):
    """The value that an attempt returned, or the failure that ended it."""

    value: T | None = None
    failure: Failure | None = None


_result_of: Callable[[tuple[Any, Failure | None]], AttemptResult[Any]] = functools.partial(tuple.__new__, AttemptResult)
"""Each step makes several, so they are made without a call of a Python function."""


def attempt(body: Callable[[], T]) -> AttemptResult[T]:
    """Run `body`. An out-of-memory inside is returned, and what it held is free again; other errors are raised.

    >>> attempt(lambda: 1 + 1).value
    2
    """
    try:
        return _result_of((body(), None))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = Failure.of(error)
        caught = error
    clear_frames(caught)
    del caught
    free_memory()
    return AttemptResult(failure=failure)


def retry(body: Callable[[], T], log: FailureLog | None = None) -> AttemptResult[T]:
    """Run `body` until it succeeds; return its value, or the last failure if it never does.

    Args:
        body: takes little memory, and may be called again after a failure anywhere in it.
        log: records every failure.
    """
    tries_left = MAX_TRIES
    while True:
        result = attempt(body)
        tries_left -= 1
        if result.failure is not None and log is not None:
            log.record(result.failure)
        if result.failure is None or not tries_left:
            return result


def clear_frames(error: BaseException) -> None:
    """Clear the finished frames of `error` and of all its causes and contexts."""
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


def free_memory() -> None:
    """Collect reference cycles, and give cached device memory back to the driver."""
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
