"""The line of the user's program that changes a tensor in place, found by running it once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.memory.model_tensors import storage_key
from penstock.memory.recovery.out_of_memory import attempt, written_tensors
from penstock.memory.user_lines import users_line_now


def find_change_line(tensors: Sequence[Tensor], run: Callable[[], object]) -> str:
    """Return the line that changes one of `tensors` while `run` runs; empty where it is not found.

    Tensors keep their values; what else `run` changes is for the caller to put back.
    """
    observer = _ChangeObserver(tensors)
    copies: list[Tensor] = []

    def observe() -> None:
        copies.extend(tensor.detach().clone() for tensor in tensors)
        with observer:
            run()

    try:
        attempt(observe)
    except Exception:  # noqa: BLE001  the error that is being explained matters, and not this one
        return observer.line
    finally:
        if len(copies) == len(tensors):
            with torch.no_grad():
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)
    return observer.line


class _ChangeObserver(TorchDispatchMode):
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keys = set(map(storage_key, tensors))
        self.line = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.line and any(storage_key(one) in self._keys for one in written_tensors(func, args, kwargs)):
            self.line = users_line_now()
        return func(*args, **kwargs)
