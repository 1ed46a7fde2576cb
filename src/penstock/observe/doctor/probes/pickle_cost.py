"""The cost of sending a dataset to a worker that is not forked: the size of its pickle, and the time to make it."""

from __future__ import annotations

import contextlib
import pickle
import time
from typing import Any

import torch

from penstock.core.object_attributes import attributes_of
from penstock.observe.doctor.probe_results import DatasetPickle


class _TimeOverError(Exception):
    """Pickling takes too long."""


class _CountingFile:
    """A file that counts its bytes and keeps none."""

    def __init__(self, until: float) -> None:
        self.nbytes = 0
        self._until = until

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.nbytes += size
        if time.perf_counter() > self._until:
            raise _TimeOverError
        return size


class _Pickler(pickle.Pickler):
    """Leaves out tensors, which are sent as shared memory, once for all workers."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.Tensor | torch.UntypedStorage):
            return int, ()
        return NotImplemented


def measure_pickle(dataset: Any, seconds: float) -> DatasetPickle:
    """Pickle `dataset` for `seconds` at most; what was pickled until then counts.

    >>> measure_pickle({"numbers": list(range(1000))}, 1.0).nbytes > 1000
    True
    """
    began = time.perf_counter()
    file = _CountingFile(began + seconds)
    failure = ""
    try:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(dataset)
    except _TimeOverError:
        pass
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    return DatasetPickle(
        nbytes=file.nbytes,
        seconds=time.perf_counter() - began,
        largest=_largest_attribute(dataset, seconds),
        failure=failure,
    )


def _largest_attribute(dataset: Any, seconds: float) -> str:
    sizes = {}
    until = time.perf_counter() + seconds
    for name, value in attributes_of(dataset).items():
        file = _CountingFile(until)
        with contextlib.suppress(Exception):  # the user's own __getstate__ may raise anything
            _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        sizes[f"self.{name}"] = file.nbytes
    return max(sizes, key=lambda name: sizes[name], default="")
