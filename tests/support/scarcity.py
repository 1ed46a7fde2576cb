"""Memory that runs out where a test wants it, without a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FailAt(TorchDispatchMode):
    """Raises at the operations of these numbers, counted from 0, each once; counts them all."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        super().__init__()
        self._numbers = set(numbers)
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = self.count
        self.count += 1
        if number in self._numbers:
            raise torch.OutOfMemoryError(f"out of memory: tried to allocate 1.00 GiB at operation {number}, {func}")
        return func(*args, **(kwargs or {}))


class Capacity(TorchDispatchMode):
    """Counts the bytes of storages that operations made and that live; raises where they would exceed `nbytes`."""

    def __init__(self, nbytes: float = float("inf")) -> None:
        super().__init__()
        self.nbytes = nbytes
        self.live = 0
        self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = self.live
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        if self.live > max(before, self.nbytes):
            raise torch.OutOfMemoryError(f"out of memory: {self.live} bytes at {func}, there are {self.nbytes}")
        self.peak = max(self.peak, self.live)
        return result

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count what is there already."""
        for tensor in tensors:
            self._count(tensor)

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.live += storage.nbytes()
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)
