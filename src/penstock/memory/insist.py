"""Operations that insist: one that runs out of memory is done again, by itself, once memory was freed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.device.oom import is_out_of_memory
from penstock.memory.failure import Failure, FailureLog, collect, let_go
from penstock.memory.holdings import storage_key

TRIES = 4


class Insisting(TorchDispatchMode):
    """While it is on, each operation of torch's that runs out of memory is tried again, up to `TRIES` times in all.

    An operation takes its memory before it changes anything, so that it can be done again.

    Args:
        watched: storages (by their `_cdata`) whose changes are counted in `changes`.
        log: takes note of every failure survived.
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
        result = self._insisted(func, args, kwargs or {})
        # Not by version counters: operations on lists of tensors do not raise them while a mode is on.
        if func._schema.is_mutable:
            keys = map(storage_key, written(func, args, kwargs or {}))
            self.changes.update(key for key in keys if key in self._watched)
        return result

    def _insisted(self, func: Any, args: Any, kwargs: Any) -> Any:
        for _ in range(TRIES - 1):
            try:
                return func(*args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failed = error
            self._log.note(Failure.of(failed))
            let_go(failed)
            del failed
            collect()
        return func(*args, **kwargs)


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation changes, as its schema says."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        yield from (one for one in ([value] if isinstance(value, Tensor) else value or ()) if isinstance(one, Tensor))
