"""Copy-on-write: whether a forked worker copies the dataset, object by object, only by reading it.

Python keeps reference counts inside objects, so reading one writes to its page, and the kernel gives the child its own
copy of that page. A forked child makes samples that it has not made before, and then the same ones once more: memory
that grows the first time and not the second is such copies, or a cache.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

from penstock.core.object_attributes import attributes_of
from penstock.core.user_code import is_users
from penstock.observe.doctor.probe_results import CopyOnWrite
from penstock.observe.doctor.probes import proc
from penstock.observe.doctor.probes.forked_child import measure_in_child
from penstock.observe.doctor.probes.sample_calls import iter_sample_calls

_MANY_OBJECTS = 20_000
"""Python objects: about 1 MiB of small objects: fewer cannot cost a worker much."""

_WARM_UP_SAMPLES = 8
_MOST_SAMPLES = 4000
_SIZED_OBJECTS = 500
_NESTED_DATASETS = 4
_CACHE = functools._lru_cache_wrapper


def measure_copy_on_write(loader: DataLoader[Any], seconds: float) -> CopyOnWrite | None:
    """Return how a forked worker's memory grows; None if nothing in the dataset could make it grow."""
    if loader._dataset_kind == _DatasetKind.Iterable or "fork" not in multiprocessing.get_all_start_methods():
        return None
    if not _lengths(loader.dataset):
        return None
    attribute, objects, size = find_object_heavy_attribute(loader.dataset) or ("", 0, 0)
    measured = measure_in_child(_run_child, loader, seconds, seconds=seconds)
    if measured is None:
        return None
    samples, first, again, growing_attribute = measured
    return CopyOnWrite(
        samples=samples,
        nbytes=first,
        repeat_nbytes=again,
        attribute=attribute,
        objects=objects,
        objects_nbytes=size,
        growing_attribute=growing_attribute,
    )


def find_object_heavy_attribute(dataset: Any) -> tuple[str, int, int] | None:
    """Return the attribute that holds the most memory in Python objects, their number and their estimated bytes.

    >>> class Paths:
    ...     def __init__(self):
    ...         self.paths = [f"{number}.jpg" for number in range(50_000)]
    >>> find_object_heavy_attribute(Paths())[:2]
    ('self.paths', 50000)
    """
    found = [
        (f"self.{name}", len(value), _size(value))
        for name, value in _attributes(dataset).items()
        if isinstance(value, list | tuple | dict | set) and len(value) >= _MANY_OBJECTS
    ]
    return max(found, key=lambda one: one[2], default=None)


def _attributes(dataset: Any) -> Mapping[str, Any]:
    """Return the attributes of a dataset, and of the dataset that it wraps (as a Subset does)."""
    found: dict[str, Any] = {}
    for one in _nested(dataset):
        found = {**attributes_of(one), **found}
    return found


def _nested(dataset: Any) -> Iterator[Any]:
    for _ in range(_NESTED_DATASETS):
        yield dataset
        own = attributes_of(dataset)
        if "dataset" not in own:
            break
        dataset = own["dataset"]


def _size(value: Any) -> int:
    every = list(value.items() if isinstance(value, dict) else value)
    some = every[:: max(1, len(every) // _SIZED_OBJECTS)]
    return int(sys.getsizeof(value) + len(every) * sum(map(_deep_size, some)) / len(some))


def _deep_size(one: Any) -> int:
    size = sys.getsizeof(one)
    if isinstance(one, list | tuple | set):
        return size + sum(map(_deep_size, one))
    return size + sum(map(_deep_size, one.values())) if isinstance(one, dict) else size


def _run_child(loader: DataLoader[Any], seconds: float, pipe: Connection) -> None:
    gc.disable()  # a collection writes to every object, too
    torch.set_num_threads(1)  # as in a worker; OpenMP's threads were not forked, and it would wait for them forever
    until = time.perf_counter() + seconds * 0.45
    sample_calls: list[Callable[[], Any]] = []
    before = private = 0
    lengths: dict[str, int] = {}
    for number, (_, make) in enumerate(iter_sample_calls(loader)):
        if number == _WARM_UP_SAMPLES:
            private, lengths = proc.private_nbytes() or 0, _lengths(loader.dataset)
        if number > _WARM_UP_SAMPLES + 8 and (time.perf_counter() > until or number > _MOST_SAMPLES):
            break
        make()
        if number >= _WARM_UP_SAMPLES:
            sample_calls.append(make)
    before = proc.private_nbytes() or 0
    grew = [name for name, length in _lengths(loader.dataset).items() if length > lengths.get(name, length)]
    for make in sample_calls:
        make()
    after = proc.private_nbytes() or 0
    pipe.send((len(sample_calls), before - private, after - before, grew[0] if grew else ""))


def _lengths(dataset: Any) -> dict[str, int]:
    return {name: length for name, value in _places(dataset).items() if (length := _length(value)) is not None}


def _places(dataset: Any) -> Mapping[str, Any]:
    """Return what may grow with a dataset: its attributes, and caches and containers of the user's modules."""
    found = {f"self.{name}": value for name, value in _attributes(dataset).items()}
    for kind in map(type, _nested(dataset)):
        module = vars(sys.modules.get(kind.__module__, kind))
        if is_users(str(module.get("__file__") or "train.py")):  # a notebook has no file
            around = [*vars(kind).items(), *module.items()]
            found.update((f"the lru_cache of {name}", value) for name, value in around if isinstance(value, _CACHE))
            kept = [(name, value) for name, value in module.items() if not name.startswith("__")]
            found.update((name, value) for name, value in kept if type(value) in (list, dict, set))
    return found


def _length(value: Any) -> int | None:
    if isinstance(value, list | dict | set) or (isinstance(value, np.ndarray | torch.Tensor) and value.ndim > 0):
        return len(value)
    return value.cache_info().currsize if isinstance(value, _CACHE) else None
