"""What making samples has left behind in a worker, that the training process would not do without being changed.

    a file, socket or pipe that stays open     workers that are forked later would share its position
    a thread                                   it would be missing in them
    an attribute of the dataset that is set    a counter, a cache, a handle
    `get_worker_info()` was read               without workers it is None
    numbers from the global random states      the program's own next ones, an order among them, would be others

Where there is nothing of this, nobody can tell which process makes the samples.
"""

from __future__ import annotations

import operator
import os
import random
import threading
from typing import Any

import numpy as np
import torch

from penstock.core.object_attributes import attributes_of, has_attributes, values_of
from penstock.loader.workers import worker
from penstock.loader.workers.worker_spec import WorkerSpec

_MOST_PARTS = 1000
"""Of a dataset of datasets."""

_OWN_SEGMENTS = "/memfd:"


class LastingEffects:
    """Compares a worker with what it was when this object was made, before its first sample.

    Args:
        worker_spec: what the worker does. Where each sample has random states of its own, the training process puts
            its own back.
    """

    def __init__(self, worker_spec: WorkerSpec) -> None:
        self._parts = [(part, values_of(part)) for part in _parts_of(worker_spec.dataset)]
        self._descriptors = _descriptors().keys()
        self._threads = threading.active_count()
        self._random_states = None if worker_spec.seeded else _random_states()

    def are_there(self) -> bool:
        """Return whether anything is different."""
        return (
            worker.is_info_read()
            or threading.active_count() > self._threads
            or any(_differ(values_of(part), before) for part, before in self._parts)
            or (self._random_states is not None and _random_states() != self._random_states)
            or self._has_opened()
        )

    def _has_opened(self) -> bool:
        opened = [target for fd, target in _descriptors().items() if fd not in self._descriptors]
        return not all(target.startswith(_OWN_SEGMENTS) for target in opened)


def _parts_of(dataset: Any) -> list[Any]:
    """Return a dataset and those that it is made of, as far as they have attributes."""
    parts: list[Any] = []
    left, seen = [dataset], set()
    while left and len(parts) < _MOST_PARTS:
        one = left.pop()
        if not has_attributes(one) or id(one) in seen:
            continue
        seen.add(id(one))
        parts.append(one)
        inner = attributes_of(one)
        several = inner.get("datasets", ())
        left += [inner.get("dataset"), *(several if isinstance(several, (list, tuple)) else ())]
    return parts


def _differ(now: list[Any], before: list[Any]) -> bool:
    return len(now) != len(before) or not all(map(operator.is_, now, before))


def _descriptors() -> dict[int, str]:
    """Return what is open, by its number; nothing where the system does not tell."""
    found = {}
    try:
        for name in os.listdir("/proc/self/fd"):
            try:
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
            except OSError:  # the descriptor of the listing itself
                continue
    except OSError:
        return {}
    return found


def _random_states() -> tuple[Any, ...]:
    numpys: Any = np.random.get_state()
    kind, keys, *position = numpys
    return random.getstate(), kind, keys.tobytes(), *position, torch.get_rng_state().numpy().tobytes()
