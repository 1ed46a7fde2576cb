"""Counts the batches of iterators that are not penstock's, and times how long the loop waits for them.

`penstock run` leaves some loaders alone: those with an iterator of their own, as torchdata's StatefulDataLoader, and
those that penstock cannot run. Their iterators run unchanged. Most of them are torch's or inherit from torch's, so
two of torch's methods are timed; a generator, which `__iter__` of a subclass may be, is passed on batch by batch.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import dataloader as torch_module

from penstock.loader.counters import Counters

_LOOP = "_penstock_loop"
"""The attribute of an iterator of torch's that holds its `TimedLoop`."""

FindCounters = Callable[[Any, Any], Counters | None]
"""Returns the counters of a loader, given it and its iterator; None to count nothing."""


class TimedLoop:
    """One iterator, and the counters of its loader. Used by the thread that iterates.

    Args:
        counters: what is written to.
        loader: whose iterator it is.
    """

    def __init__(self, counters: Counters, loader: Any) -> None:
        self._counters = counters
        self._batch_size = getattr(loader, "batch_size", None)
        self._has_batches = getattr(loader, "batch_sampler", None) is not None
        kind = getattr(loader, "_dataset_kind", None)
        # The sampler says how many samples a batch has, but for the last of a stream, which may be short.
        is_stream = kind == torch_module._DatasetKind.Iterable and self._batch_size is not None
        is_collated = getattr(loader, "collate_fn", None) is torch_module.default_collate
        self._looks_at_batch = (is_stream and is_collated) or not isinstance(loader, TorchDataLoader)
        self.sizes: deque[int] = deque()
        """Samples in the batches that were asked for and have not come yet."""
        self.begin()

    def begin(self) -> None:
        """Begin a pass."""
        self.sizes.clear()
        self.making_ns = 0
        """What it took to make the iterator."""
        self._returned_ns = 0
        self._yielded = 0

    def ask(self, index: Any) -> None:
        """Note that a batch was asked for, by its indices; of a loader that makes no batches, a sample by its index."""
        self.sizes.append(len(index) if self._has_batches and hasattr(index, "__len__") else 1)

    def next_batch(self, next_batch: Callable[[], Any]) -> Any:
        """Return what `next_batch` returns, and count it."""
        counters, began_ns = self._counters, time.perf_counter_ns()
        counters.begun_ns = counters.begun_ns or began_ns
        counters.step_ns += began_ns - (self._returned_ns or began_ns)
        try:
            batch = next_batch()
        except StopIteration:
            counters.wait_ns += time.perf_counter_ns() - began_ns
            if counters.recorder is not None and self._returned_ns:
                counters.recorder.add_step(self._returned_ns, began_ns, counters.epochs, self._yielded - 1)
            counters.epochs += 1
            self._returned_ns = 0
            raise
        except BaseException:
            counters.wait_ns += time.perf_counter_ns() - began_ns
            self._returned_ns = 0
            raise
        self._count(batch, began_ns)
        self._returned_ns = time.perf_counter_ns()
        return batch

    def _count(self, batch: Any, began_ns: int) -> None:
        counters, now_ns = self._counters, time.perf_counter_ns()
        counters.wait_ns += now_ns - began_ns
        if counters.recorder is not None:
            counters.recorder.add_turn(self._returned_ns, began_ns, now_ns, counters.epochs, self._yielded)
        if not self._yielded:
            counters.first_batch_ns = self.making_ns + now_ns - began_ns
        self._yielded += 1
        counters.batches += 1
        size = self.sizes.popleft() if self.sizes else None
        if size is None or self._looks_at_batch:
            size = _leading_size(batch) or size or self._batch_size or 1
        counters.samples += size


class TorchWatch:
    """Times torch's iterators, and generators of loaders' subclasses.

    Args:
        find_counters: called for every new iterator.
    """

    def __init__(self, find_counters: FindCounters) -> None:
        self._find_counters = find_counters
        self._originals: list[tuple[Any, str, Any]] = []
        self._skips = threading.local()

    def install(self) -> None:
        """Begin to time torch's iterators."""
        base = torch_module._BaseDataLoaderIter
        self.replace(base, "_reset", self._around_reset)
        self.replace(base, "_next_index", self._around_next_index)
        self.time_iterators(torch_module._SingleProcessDataLoaderIter)
        self.time_iterators(torch_module._MultiProcessingDataLoaderIter)

    def time_iterators(self, kind: type) -> None:
        """Time a class of iterators that inherits from torch's and has a constructor and a `_next_data` of its own."""
        self.replace(kind, "__init__", self._around_init)
        # Not __next__: its warnings are placed by counting frames.
        self.replace(kind, "_next_data", self._around_next_data)

    def time_nodes(self, kind: type) -> None:
        """Time a class of iterators that has a constructor, `reset` and `next`, and looks ahead in `has_next`."""
        self.replace(kind, "__init__", self._around_init)
        self.replace(kind, "reset", self._around_reset)
        self.replace(kind, "next", self._around_next_data)
        self.replace(kind, "has_next", self._around_uncounted)

    def time_generators(self, kind: type, base: type) -> None:
        """Time generators that `__iter__` of `kind` returns; `base` and what it inherits from are left as they are.

        Counters of a generator are found with the loader in place of an iterator.
        """
        for one in kind.__mro__[: kind.__mro__.index(base)]:
            found = one.__dict__.get("__iter__")
            if found is not None and not hasattr(found, _LOOP):
                self.replace(one, "__iter__", functools.partial(self._around_iter, one))
                setattr(one.__dict__["__iter__"], _LOOP, True)

    def replace(self, kind: type, name: str, around: Callable[[Any], Any]) -> None:
        """Replace a method of `kind` by what `around` makes of it, until `remove`."""
        original = kind.__dict__.get(name)
        if original is None:  # another version of torch or torchdata
            return
        self._originals.append((kind, name, original))
        setattr(kind, name, functools.wraps(original)(around(original)))

    def remove(self) -> None:
        """Stop: give the classes their own methods back."""
        while self._originals:
            kind, name, original = self._originals.pop()
            setattr(kind, name, original)

    @contextlib.contextmanager
    def not_counting(self) -> Iterator[None]:
        """Count none of the batches that this thread takes: a loader that resumes may run through those before."""
        self._skips.is_on = True
        try:
            yield
        finally:
            self._skips.is_on = False

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _around_init(self, original: Any) -> Any:
        def init(iterator: Any, loader: Any, *args: Any, **options: Any) -> None:
            counters = self._find_counters(loader, iterator)
            if counters is None:
                original(iterator, loader, *args, **options)
                return
            loop = TimedLoop(counters, loader)
            setattr(iterator, _LOOP, loop)
            began_ns = time.perf_counter_ns()
            original(iterator, loader, *args, **options)
            loop.making_ns = time.perf_counter_ns() - began_ns
            counters.length = _length(iterator, loader)

        return init

    def _around_reset(self, original: Any) -> Any:
        def reset(iterator: Any, *args: Any, **options: Any) -> None:
            if (loop := getattr(iterator, _LOOP, None)) is not None:
                loop.begin()
            original(iterator, *args, **options)

        return reset

    def _around_next_index(self, original: Any) -> Any:
        def next_index(iterator: Any) -> Any:
            index = original(iterator)
            if (loop := getattr(iterator, _LOOP, None)) is not None:
                loop.ask(index)
            return index

        return next_index

    def _around_next_data(self, original: Any) -> Any:
        def next_data(iterator: Any) -> Any:
            loop = getattr(iterator, _LOOP, None)
            if loop is None:
                return original(iterator)
            if getattr(self._skips, "is_on", False):
                batch = original(iterator)
                if loop.sizes:
                    loop.sizes.popleft()
                return batch
            return loop.next_batch(functools.partial(original, iterator))

        return next_data

    def _around_uncounted(self, original: Any) -> Any:
        def uncounted(iterator: Any) -> Any:
            with self.not_counting():
                return original(iterator)

        return uncounted

    def _around_iter(self, kind: type, original: Any) -> Any:
        def iterate(loader: Any) -> Any:
            iterator = original(loader)
            first = next(one for one in type(loader).__mro__ if "__iter__" in one.__dict__)
            counters = self._find_counters(loader, loader) if first is kind else None
            if counters is None:
                return iterator
            if type(iterator) is GeneratorType:
                return _pass_on(TimedLoop(counters, loader), iterator)
            counters.begun_ns = counters.begun_ns or time.perf_counter_ns()
            return iterator

        return iterate


def _pass_on(loop: TimedLoop, batches: Iterator[Any]) -> Generator[Any, None, Any]:
    while True:
        try:
            batch = loop.next_batch(functools.partial(next, batches))
        except StopIteration as end:
            return end.value
        yield batch


def _length(iterator: Any, loader: Any) -> int | None:
    """Return how many batches a pass has, as far as that is known."""
    if getattr(iterator, "_dataset_kind", None) == torch_module._DatasetKind.Iterable:
        announced: int | None = getattr(loader, "_IterableDataset_len_called", None)
        return announced
    with contextlib.suppress(Exception):  # a sampler of the user's may have no length, or one that fails
        return len(iterator)
    return None


def _leading_size(batch: Any) -> int | None:
    """Return the length of the first tensor or list of texts in a batch; None if there is none."""
    while True:
        if isinstance(batch, torch.Tensor):
            return len(batch) if batch.dim() else None
        if isinstance(batch, Mapping):
            batch = next(iter(batch.values()), None)
        elif isinstance(batch, list | tuple) and batch:
            if isinstance(batch[0], str | bytes):
                return len(batch)
            batch = batch[0]
        else:
            return None
