"""Attempting what may run out of memory: what failed, freeing what it held, and trying it again.

The frames of a traceback keep the tensors of the failed attempt alive, and they cannot be freed while the exception is
being handled. So `except` only describes the failure: a `Failure` refers to no frame and no tensor. Afterwards the
frames are cleared over the whole chain of causes and contexts, reference cycles are collected, and cached device blocks
go back to the driver.
"""

from __future__ import annotations

import functools
import gc
import traceback
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.core.errors import PenstockError
from penstock.device.oom import is_out_of_memory, requested_nbytes
from penstock.memory.model_tensors import storage_key
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


T = TypeVar("T")

MAX_TRIES = 6
"""Consecutive failures of one thing before giving up."""


class OutOfMemoryError(PenstockError, torch.OutOfMemoryError):
    """Memory ran out, and smaller micro-batches did not help. The message has what would have fitted."""


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


OPERATION_TRIES = 4


class RetryOps(TorchDispatchMode):
    """While it is on, an operation of torch that runs out of memory is retried, up to `OPERATION_TRIES` calls in all.

    An operation allocates before it changes anything, so calling it again is safe.

    Args:
        watched: storages (by their `_cdata`) whose changes are counted in `changes`.
        log: records every failure survived.
    """

    def __init__(self, watched: Container[int], log: FailureLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.changes: Counter[int] = Counter()
        self._watched = watched
        self._log = log

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch would import its compiler for the first operation, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._call_with_retries(func, args, kwargs or {})
        # Not by version counters: operations on lists of tensors do not raise them while a mode is on.
        if func._schema.is_mutable:
            keys = map(storage_key, written_tensors(func, args, kwargs or {}))
            self.changes.update(key for key in keys if key in self._watched)
        return result

    def _call_with_retries(self, func: Any, args: Any, kwargs: Any) -> Any:
        for _ in range(OPERATION_TRIES - 1):
            try:
                return func(*args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failed = error
            self._log.record(Failure.of(failed))
            clear_frames(failed)
            del failed
            free_memory()
        return func(*args, **kwargs)


def call_with_retries(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `body` with each of its operations retried by itself."""
    with RetryOps((), FailureLog()):
        return body(*args, **kwargs)


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation changes, according to its schema."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        yield from (one for one in ([value] if isinstance(value, Tensor) else value or ()) if isinstance(one, Tensor))
