"""RetryOps: a dispatch mode under which each operation that runs out of memory is retried by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.device.oom import is_out_of_memory
from penstock.memory.model_tensors import storage_key
from penstock.memory.recovery.attempt import clear_frames, free_memory
from penstock.memory.recovery.failure import Failure, FailureLog

MAX_TRIES = 4


class RetryOps(TorchDispatchMode):
    """While it is on, an operation of torch that runs out of memory is retried, up to `MAX_TRIES` calls in all.

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
        for _ in range(MAX_TRIES - 1):
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
