"""The ways to bring batches to a training step, and how long a step takes with each of them.

Without a GPU all of it runs on the CPU, where nothing is copied: for tests.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import penstock

T = TypeVar("T")
CUDA = torch.cuda.is_available()
PLACE = "cuda" if CUDA else "cpu"
RESIDENT = "resident"
"""The name of the bound: each step gets the same batch, which lies on the device already."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A loader, and how its batches get to the device."""

    loader: str
    """torch or penstock."""
    pin_memory: bool = False
    non_blocking: bool = False
    ahead: bool = False
    """With `device=`, else by `.to`."""

    @property
    def name(self) -> str:
        """Its name in results."""
        if self.ahead:
            return f"{self.loader}, device="
        return ", ".join([self.loader, *(word for word in ("pin_memory", "non_blocking") if getattr(self, word))])

    def open(self, dataset: Dataset[Any], **options: Any) -> Any:
        """Return the loader."""
        if self.ahead:
            options["device"] = PLACE
        elif CUDA:  # elsewhere it does nothing but warn
            options["pin_memory"] = self.pin_memory
        return (TorchDataLoader if self.loader == "torch" else penstock.DataLoader)(dataset, **options)

    def moved(self, batch: Any) -> Any:
        """Return a batch of the loader on the device."""
        return batch if self.ahead else moved(batch, non_blocking=self.non_blocking)


TORCH_PLAIN = Way(loader="torch")
TORCH_PINS = Way(loader="torch", pin_memory=True)
TORCH_NON_BLOCKING = Way(loader="torch", non_blocking=True)
TORCH = Way(loader="torch", pin_memory=True, non_blocking=True)
PLAIN = Way(loader="penstock")
PINNED = Way(loader="penstock", pin_memory=True, non_blocking=True)
AHEAD = Way(loader="penstock", ahead=True)
BEST = (TORCH, PINNED, AHEAD)
"""The best way of each kind."""


def moved(batch: Any, *, non_blocking: bool = False) -> Any:
    """Return a tensor, or a dict or list with tensors, on the device."""
    if isinstance(batch, Tensor):
        return batch.to(PLACE, non_blocking=non_blocking)
    if isinstance(batch, dict):
        return {name: moved(part, non_blocking=non_blocking) for name, part in batch.items()}
    if isinstance(batch, list | tuple):
        return [moved(part, non_blocking=non_blocking) for part in batch]
    return batch


def settle() -> None:
    """Wait for the device."""
    if CUDA:
        torch.cuda.synchronize()


def repeated(batch: Any, times: int) -> Callable[[], Iterator[Any]]:
    """Return the feed of a batch that lies on the device already."""
    return lambda: itertools.repeat(batch, times)


def fed(way: Way, loader: Iterable[Any]) -> Callable[[], Iterator[Any]]:
    """Return the feed of a way, from its open loader."""
    return lambda: iter(loader) if way.ahead else map(way.moved, loader)


class Lead:
    """How many steps the host is ahead of the device, asked at every step."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._events: list[Any] = []

    def step(self) -> None:
        """Call it after each step."""
        if not CUDA:
            return
        event = torch.cuda.Event()
        event.record()
        self._events = [one for one in self._events if not one.query()] + [event]
        self.steps.append(len(self._events) - 1)


def timed(
    feed: Callable[[], Iterator[Any]], step: Callable[[Any], object], most: int | None = None, lead: Lead | None = None
) -> dict[str, float]:
    """Return the milliseconds until the first batch is there, and of a step from then on."""
    gc.collect()
    settle()
    began, first_s, count = time.perf_counter(), 0.0, 0
    for batch in itertools.islice(feed(), most):
        if not count:
            first_s = time.perf_counter() - began
        step(batch)
        count += 1
        if lead is not None:
            lead.step()
    batch = None
    settle()
    return {"first_ms": first_s * 1e3, "step_ms": (time.perf_counter() - began - first_s) / max(1, count) * 1e3}


def timed_copies(
    way: Way, loader: Iterable[Any], step: Callable[[Any], object], most: int | None = None
) -> dict[str, float]:
    """Return also the median milliseconds of a batch's copy, between two events on the stream of the step."""
    marks: list[tuple[Any, Any]] = []

    def copied() -> Iterator[Any]:
        for batch in loader:
            begin = _mark()
            there = way.moved(batch)
            marks.append((begin, _mark()))
            yield there

    found = timed(copied, step, most)
    return {**found, "transfer_ms": median(_between_ms(*pair) for pair in marks)}


def _mark() -> Any:
    if not CUDA:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between_ms(begin: Any, end: Any) -> float:
    return (end - begin) * 1e3 if isinstance(begin, float) else float(begin.elapsed_time(end))


def in_turns(feeds: dict[str, Callable[[], T]], number: int) -> dict[str, T]:
    """Return what each measured in round `number`; every second round goes backwards."""
    names = list(feeds)
    found = {name: feeds[name]() for name in (reversed(names) if number % 2 else names)}
    return {name: found[name] for name in names}
