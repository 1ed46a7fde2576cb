"""One pass of a loop over a DataLoader, or many with persistent workers: the iterator, and what it keeps count of."""

from __future__ import annotations

import contextlib
import time
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import _DatasetKind

from penstock.distributed.alarm import alarm_for
from penstock.feed.course import Course, begin_course
from penstock.feed.epoch import EpochRunner
from penstock.feed.inline import InlineRunner
from penstock.feed.pinning import pinning_of
from penstock.feed.prefetch import Prefetcher
from penstock.feed.wiring import close_all, dispatch_of, job_of, pool_of, ring_of

if TYPE_CHECKING:
    from penstock.feed.loader import DataLoader


class LoaderIterator:
    """Iterates over one epoch of a `DataLoader` (over many, with persistent workers)."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._alarm = alarm_for(loader.rank, loader.world_size) if loader._distributed else None
        try:
            self._set_up(loader)
        except Exception as error:
            if self._alarm is not None:
                self._alarm.ring(error)
                self._alarm.close()
            raise

    def _set_up(self, loader: DataLoader[Any]) -> None:
        began = time.perf_counter_ns()
        self._dataset = loader.dataset
        self._iterable = loader._dataset_kind == _DatasetKind.Iterable
        self._persistent = loader.persistent_workers
        self._counters = loader._counters
        self._index_sampler = loader._index_sampler
        pinning = pinning_of(loader._pins, loader.pin_memory_device, loader._device)
        self._finish_pinning = pinning.finish
        self._counters.pinning = pinning.reason
        self._profile_name = f"enumerate(DataLoader)#{type(self).__name__}.__next__"
        self._num_workers = loader.num_workers
        course = begin_course(loader)
        self._base_seed = course.base_seed
        self._ring = ring_of(loader, pinning)
        if loader.num_workers == 0:
            if loader.timeout != 0:
                raise AssertionError(
                    "num_workers=0 loads in the training process, which cannot time out; use timeout=0"
                )
            self._workers: list[Any] = []
            self._close: Callable[[], Any] = lambda: None
            inline = InlineRunner(
                job_of(loader),
                self._ring,
                self._counters,
                course.indices,
                base_seed=course.base_seed,
                epoch_seed=course.epoch_seed,
                lanes=course.lanes,
                turn=course.turn,
                init_fn=loader.worker_init_fn,
            )
            course.look_at(inline.look)
            host: InlineRunner | EpochRunner = inline
        else:
            dispatch = dispatch_of(loader)
            pool = pool_of(loader, dispatch, course.base_seed, pinning.numa_node)
            self._workers = pool.processes
            runner = EpochRunner(
                job=job_of(loader),
                pool=pool,
                ring=self._ring,
                dispatch=dispatch,
                counters=self._counters,
                in_order=loader.in_order,
                timeout_s=loader.timeout,
                max_deaths=loader._max_deaths,
                spare_slots=1 + pinning.slots_in_copies,
                snapshot_every=loader._snapshot_every,
                regulator=loader._regulator,
            )
            runner.start(course.lanes)
            self._close = runner.close
            runner.begin(course.indices, course.epoch_seed, course.lanes, course.turn)
            host = runner
        self._host = host
        self._runner: InlineRunner | EpochRunner | Prefetcher = host
        if loader._device is not None and not loader._device.is_host:
            self._runner = Prefetcher(
                host,
                loader._device,
                budget_nbytes=loader._device_bytes,
                counters=self._counters,
                trial=loader._trial,
                receipt_of=lambda: host.receipt,
            )
        flight = self._runner.flight if isinstance(self._runner, Prefetcher) else None
        weakref.finalize(self, close_all, flight, self._close, loader._shelf, self._ring, self._alarm).atexit = False
        self._start_epoch(loader, course, began)
        self._counters.loop = weakref.ref(self)

    def _start_epoch(self, loader: DataLoader[Any], course: Course, began: int) -> None:
        self._course = loader._course = course
        self._began = began
        self._yielded = 0
        self._over = False
        self._returned_at = 0
        self._promised: int | None = loader._IterableDataset_len_called
        self._counters.length = self._promised if self._iterable else _length(self._index_sampler)

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin another epoch with the same workers (called by torch's `DataLoader.__iter__`)."""
        began = time.perf_counter_ns()
        assert isinstance(self._host, EpochRunner)
        if not self._host.close.alive:
            raise RuntimeError("these persistent workers have been shut down; make a new DataLoader")
        if isinstance(self._runner, Prefetcher):
            self._runner.close()
        course = begin_course(loader, self._base_seed)
        self._host.begin(course.indices, course.epoch_seed, course.lanes, course.turn)
        self._start_epoch(loader, course, began)

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._index_sampler)

    def __next__(self) -> Any:
        counters = self._counters
        began = time.perf_counter_ns()
        if self._over:
            raise StopIteration
        if self._alarm is not None:
            self._alarm.check()
        if self._returned_at:
            counters.step_ns += began - self._returned_at
            if counters.recorder is not None:
                counters.recorder.add("step", self._returned_at, began, counters.epochs, self._yielded - 1)
        waited, made = counters.wait_ns, counters.inline_ns
        try:
            with torch.autograd.profiler.record_function(self._profile_name):
                batch = self._runner.next_batch()
                if self._finish_pinning is not None:
                    batch = self._finish_pinning(batch)
        except StopIteration:
            self._finish()
            raise
        except Exception as error:
            if self._alarm is not None:
                self._alarm.ring(error)
            raise
        finally:
            self._returned_at = time.perf_counter_ns()
            elsewhere = counters.wait_ns - waited + counters.inline_ns - made
            counters.transport_ns += self._returned_at - began - elsewhere
        if counters.recorder is not None:
            counters.recorder.add("next", began, self._returned_at, counters.epochs, self._yielded)
        self._course.used(self._runner.receipt)
        self._yielded += 1
        if self._yielded == 1:
            counters.first_batch_ns = self._returned_at - self._began
        if self._iterable and self._promised is not None and self._yielded > self._promised:
            self._warn_of_length()
        return batch

    def _finish(self) -> None:
        self._over = True
        self._course.finish(self._host.unused)
        self._counters.epochs += 1
        if not self._persistent:
            self._shutdown_workers()

    def _shutdown_workers(self) -> None:
        """Stop the workers now (the name that Lightning and others call on torch's iterator)."""
        self._over = True
        self._close()
        if self._alarm is not None:
            self._alarm.close()

    def _warn_of_length(self) -> None:
        words = (
            f"Length of IterableDataset {self._dataset} was reported to be {self._promised} "
            f"(when accessing len(dataloader)), but {self._yielded} samples have been fetched. "
        )
        if self._num_workers > 0:
            words += (
                "For multiprocessing data-loading, this could be caused by not properly configuring the "
                "IterableDataset replica at each worker. Please see "
                "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
            )
        warnings.warn(words, stacklevel=3)


def _length(sampler: Any) -> int | None:
    with contextlib.suppress(Exception):  # a sampler of the user's may have no length, or one that fails
        return len(sampler)
    return None
