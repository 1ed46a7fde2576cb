"""Operations that insist: one that runs out of memory is done again, by itself, once memory was freed."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.device.oom import is_out_of_memory
from penstock.memory.failure import Failure, FailureLog, collect, let_go

TRIES = 4


class Insisting(TorchDispatchMode):
    """While it is on, each operation of torch's that runs out of memory is tried again, up to `TRIES` times in all.

    An operation takes its memory before it changes anything. One on lists of tensors may not; where it has changed some
    of them, as their version counters tell, the error is raised, for doing it again would be wrong.

    Args:
        log: takes note of every failure survived.
    """

    def __init__(self, log: FailureLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch would import its compiler for the first operation, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        versions = _versions(args)
        for _ in range(TRIES - 1):
            try:
                return func(*args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error) or _versions(args) != versions:
                    raise
                failed = error
            self._log.note(Failure.of(failed))
            let_go(failed)
            del failed
            collect()
        return func(*args, **kwargs)


def _versions(args: tuple[Any, ...]) -> list[int]:
    """Return the version counters of the lists of tensors among `args`."""
    return [one._version for arg in args if type(arg) is list for one in arg if isinstance(one, Tensor)]
