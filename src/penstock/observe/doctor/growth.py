"""Copy-on-write: does a forked worker copy the dataset, object by object, only by looking at it?

Python counts references inside of objects, so that reading one writes to its page, and a page that parent and child
shared becomes two. A forked child makes samples that it has not made before and then the same ones again: what grows
the first time and not the second is such copies, or a cache.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

from penstock.observe.doctor import proc
from penstock.observe.doctor.dataset import calls
from penstock.observe.examination import Growth

_MANY = 20_000
_PLAIN = (int, float, bool, type(None))
_WARM = 8
_MOST = 4000
_GRACE_S = 1.0


def growth(loader: DataLoader[Any], seconds: float) -> Growth | None:
    """Return how a forked worker's memory grows; None where nothing in the dataset could make it grow."""
    if loader._dataset_kind == _DatasetKind.Iterable or "fork" not in multiprocessing.get_all_start_methods():
        return None
    if not _lengths(loader.dataset):
        return None
    attribute, objects, size = crowded(loader.dataset) or ("", 0, 0)
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_child, args=(loader, seconds, there), daemon=True)
    child.start()
    there.close()
    try:
        if not here.poll(seconds + _GRACE_S):
            return None
        samples, first, again, grew = here.recv()
    except EOFError:
        return None
    finally:
        child.kill()
        child.join()
        child.close()
        here.close()
    return Growth(
        samples=samples,
        nbytes=first,
        again_nbytes=again,
        attribute=attribute,
        objects=objects,
        objects_nbytes=size,
        grew=grew,
    )


def crowded(dataset: Any) -> tuple[str, int, int] | None:
    """Return the attribute on which most Python objects hang, how many they are and their bytes, about.

    >>> class Paths:
    ...     def __init__(self):
    ...         self.paths = [f"{number}.jpg" for number in range(50_000)]
    >>> crowded(Paths())[:2]
    ('self.paths', 50000)
    """
    found = [
        (f"self.{name}", len(value), _size(value))
        for name, value in _attributes(dataset).items()
        if isinstance(value, list | tuple | dict | set) and len(value) >= _MANY
    ]
    return max(found, key=lambda one: one[2], default=None)


def _attributes(dataset: Any) -> Mapping[str, Any]:
    """Return what hangs on a dataset, and on the dataset that it wraps (as a Subset does)."""
    found: dict[str, Any] = {}
    for _ in range(4):
        own = getattr(dataset, "__dict__", {})
        found = {**own, **found}
        if "dataset" not in own:
            break
        dataset = own["dataset"]
    return found


def _size(value: Any) -> int:
    every = list(value.items() if isinstance(value, dict) else value)
    some = every[:: max(1, len(every) // 500)]
    return int(sys.getsizeof(value) + len(every) * sum(map(_deep, some)) / len(some))


def _deep(one: Any) -> int:
    size = sys.getsizeof(one)
    if isinstance(one, list | tuple | set):
        return size + sum(map(_deep, one))
    return size + sum(map(_deep, one.values())) if isinstance(one, dict) else size


def _child(loader: DataLoader[Any], seconds: float, pipe: Connection) -> None:
    gc.disable()  # a collection touches every object, too
    torch.set_num_threads(1)  # as in a worker; OpenMP's threads were not forked, and it would wait for them for ever
    until = time.perf_counter() + seconds * 0.6
    makers: list[Callable[[], Any]] = []
    before = private = 0
    lengths: dict[str, int] = {}
    for number, (_, make) in enumerate(calls(loader)):
        if number == _WARM:
            private, lengths = proc.private_nbytes() or 0, _lengths(loader.dataset)
        if number > _WARM + 8 and (time.perf_counter() > until or number > _MOST):
            break
        make()
        if number >= _WARM:
            makers.append(make)
    before = proc.private_nbytes() or 0
    grew = [name for name, length in _lengths(loader.dataset).items() if length > lengths.get(name, length)]
    for make in makers:
        make()
    after = proc.private_nbytes() or 0
    pipe.send((len(makers), before - private, after - before, grew[0] if grew else ""))


def _lengths(dataset: Any) -> dict[str, int]:
    return {
        f"self.{name}": len(value)
        for name, value in _attributes(dataset).items()
        if isinstance(value, list | dict | set)
    }
