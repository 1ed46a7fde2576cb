"""The loops of a program that nobody edited: whoever iterates over a DataLoader gets an iterator of ours.

It gives what the loader itself would give, until it is asked from a training loop; from then on that loop is conducted.
Loops over other loaders (a validation, whenever the program has counted an epoch's batches) are then cut short, or they
would take the time that the trials need: where loading is free, an epoch is soon over.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock.observe.doctor.conduct import Conductor
from penstock.observe.doctor.sources import iterate

_ENOUGH_OF_OTHERS = 2


class _Watched:
    """What a program gets for `iter(loader)`: the loader's own batches, or the conductor's."""

    def __init__(self, conductor: Conductor, loader: DataLoader[Any]) -> None:
        self._conductor = conductor
        self._loader = loader
        self._own: Any = None
        self._given = 0
        self._asked_at: float | None = None

    def __iter__(self) -> _Watched:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        conductor = self._conductor
        if conductor.loader is None and self._is_it():
            self._own = None
            conductor.begin(self._loader)
        if conductor.loader is self._loader:
            if self._own is None:
                self._own = conductor
                conductor.beginnings += 1
            conductor.asked += 1
            return next(conductor)
        if conductor.loader is not None:
            conductor.interrupt()
            self._given += 1
            if self._given > _ENOUGH_OF_OTHERS:
                raise StopIteration
        if self._own is None:
            self._own = iterate(self._loader)
        return next(self._own)

    def _is_it(self) -> bool:
        now = time.perf_counter()
        self._conductor.passive_s += 0.0 if self._asked_at is None else now - self._asked_at
        self._asked_at = now
        return self._conductor.is_for(training=torch.is_grad_enabled())


@contextmanager
def conducted(conductor: Conductor) -> Iterator[None]:
    """Let `conductor` feed the first training loop over any DataLoader, torch's or one derived from it."""

    def watch(loader: DataLoader[Any]) -> Any:
        return _Watched(conductor, loader)

    DataLoader.__iter__ = watch  # type: ignore[method-assign]
    try:
        yield
    finally:
        DataLoader.__iter__ = iterate  # type: ignore[method-assign]
