"""DataLoader: torch's signature, wired to the road of a batch."""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterDataPipe, MapDataPipe, Sampler
from torch.utils.data.dataloader import _DatasetKind

from penstock.core.errors import OptionError
from penstock.core.host import available_nbytes, pinnable_nbytes, usable_cores
from penstock.core.numa import cores_near, prefer_memory
from penstock.core.stats import LoaderStatistics, RingCounts
from penstock.device import Device, device_of
from penstock.feed.auto import Regulator
from penstock.feed.counters import Counters
from penstock.feed.depth import DepthTrial
from penstock.feed.dispatch import Dispatch, Mode
from penstock.feed.epoch import EpochRunner
from penstock.feed.inline import InlineRunner
from penstock.feed.pinning import Pinning, pinning_of
from penstock.feed.prefetch import DEPTH, Flight, Prefetcher
from penstock.feed.sources.base import Source
from penstock.feed.sources.order import RunOrder
from penstock.feed.sources.stream import Stream
from penstock.feed.transport.ring import Ring
from penstock.feed.transport.slab import PrivateSlab, Slab, create, memfd_works
from penstock.feed.workers.base import Pool
from penstock.feed.workers.maker import ErrorPolicy, Job
from penstock.feed.workers.process import ProcessPool
from penstock.feed.workers.thread import ThreadPool

T_co = TypeVar("T_co", covariant=True)

_MOST_WORKERS = 16

observers: list[Callable[[DataLoader[Any]], None]] = []
"""Called with every DataLoader at the end of its construction."""


class DataLoader(TorchDataLoader[T_co]):
    """torch's `DataLoader`, with its arguments and its batches, on a ring of reused slots.

    Batches equal those of `torch.utils.data.DataLoader` for the same arguments and the same generator: same order,
    same types, same bytes. Their tensors are views of a slot; the slot is used again when the last view has died, so
    keeping batches is safe (`list(loader)` works; what exceeds `ring_bytes` is copied out).

    Args:
        dataset: and all that follow up to `in_order`: as in torch's DataLoader.
        num_workers: also "auto": workers come and go while the loop runs, until the step does not wait, at most one
            for each core that this process may use, by affinity and cgroup quota (and at most 16); none at all where
            making a batch takes less than fetching it. Where samples can tell their worker (`dispatch`), the number
            changes only between epochs; for an iterable dataset it is one fewer than the cores, at most 8. See
            `statistics().workers_reason`. The batches depend on the number where samples can tell their worker.
        workers: "process", or "thread" for datasets that release the GIL.
        dispatch: "auto" (torch's assignment of batches to workers where samples can tell their worker, by drawing
            from its random state, reading `get_worker_info()` or having a `worker_init_fn`; else "demand"),
            "demand" (a free worker takes the next piece; large batches are filled by several workers), or
            "round_robin" (torch's assignment always).
        errors: what to do with a sample that raises: "raise", "skip" (leave it out and count it), or a callable
            `(exception, index) -> sample` whose result takes its place (`penstock.SKIP` leaves it out).
        keep_batch_size: with `errors`, fill up a batch that lost samples by repeating its first good ones.
        max_deaths: a sample on which so many worker processes died is put in quarantine: an error, or left out under
            `errors="skip"`.
        ring_bytes: the most bytes that batches under way and held may occupy in slots; a quarter of the memory
            available by default.
        pin_memory: as in torch's, on pinned slots: a batch is not copied to be pinned, and its slot is not used again
            before copies that you started from it are over, on whatever stream. "auto" pins where a measurement shows
            that copies gain by it. (A `penstock.device.Device` pins for that device.)
        device: "cuda", "cuda:1", any accelerator of torch's, "cpu", or "sim" (a simulated one): batches arrive there,
            copied ahead on a side stream from pinned slots, ordered on the current stream.
        device_bytes: with `device`, the most device memory that batches copied ahead may take.

    Raises:
        OptionError: an argument of penstock's own makes no sense. (For torch's own: as torch.)

    Example:
        >>> import torch
        >>> loader = DataLoader(torch.arange(10.0), batch_size=4)
        >>> [batch.tolist() for batch in loader]
        [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0]]
        >>> loader.statistics().samples
        10
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | Literal["auto"] | Device = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        workers: Literal["process", "thread"] = "process",
        dispatch: Literal["auto", "demand", "round_robin"] = "auto",
        errors: ErrorPolicy = "raise",
        keep_batch_size: bool = False,
        max_deaths: int = 3,
        ring_bytes: int | None = None,
        device: str | torch.device | Device | None = None,
        device_bytes: int = 512 << 20,
    ) -> None:
        _check(workers=workers, dispatch=dispatch, errors=errors, max_deaths=max_deaths, ring_bytes=ring_bytes)
        self._body = workers
        self._dispatch_option = dispatch
        self._errors = errors
        self._keep_batch_size = keep_batch_size
        self._max_deaths = max_deaths
        self._ring_bytes = ring_bytes
        self._device = None if device is None else device_of(device)
        self._device_bytes = device_bytes
        self._trial = DepthTrial(DEPTH)
        self._pins = pin_memory
        self._counters = Counters()
        self._ring: Ring | None = None
        self._shelf = _Shelf()
        weakref.finalize(self, self._shelf.close)
        self._learned: Dispatch | None = None
        self._regulator: Regulator | None = None
        lanes = _auto_workers() if num_workers == "auto" else num_workers
        if shuffle and sampler is None and batch_sampler is None and isinstance(dataset, Source):
            order = _order(dataset, batch_size, lanes, generator)
            if order is not None:
                sampler, shuffle = order, None
                self._dispatch_option = "round_robin" if dispatch == "auto" else dispatch
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            lanes,
            collate_fn,
            bool(pin_memory),
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        if workers == "thread" and self._dataset_kind == _DatasetKind.Iterable and self.num_workers > 1:
            raise OptionError(
                "threads share one dataset object, and an IterableDataset cannot tell them apart to share out its "
                "samples; use workers='process', or num_workers=1"
            )
        if num_workers == "auto":
            make_auto(self)
        for observer in observers:
            observer(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _ring=None, _shelf=_Shelf(), _learned=None, _counters=Counters(), _iterator=None)
        weakref.finalize(self, self._shelf.close)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: rings, counters, a persistent iterator."""
        own = ("_ring", "_shelf", "_learned", "_counters", "_iterator")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def statistics(self) -> LoaderStatistics:
        """Return what has been counted so far: times by stage, stalls, slots, deaths, skipped samples."""
        with_workers = self.num_workers > 0
        return self._counters.snapshot(
            ring=self._ring.counts() if self._ring is not None else RingCounts(),
            body=self._body if with_workers else "inline",
            start_method=_start_method(self) if with_workers and self._body == "process" else "",
            workers=self.num_workers,
        )

    def _get_iterator(self) -> Any:
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)) or not hasattr(os, "register_at_fork"):
            # Legacy DataPipes shard and shuffle through torch's own iterator; on Windows there are no socket pairs.
            return super()._get_iterator()
        if self.num_workers > 0:
            self.check_worker_number_rationality()
        return LoaderIterator(self)


class LoaderIterator:
    """Iterates over one epoch of a `DataLoader` (over many, with persistent workers)."""

    def __init__(self, loader: DataLoader[Any]) -> None:
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
        indices = iter(loader._index_sampler)
        # Drawn also when nothing uses it: the generator must be where torch's loader would have left it.
        base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
        self._ring = _borrow_ring(loader, pinning)
        if loader.num_workers == 0:
            if loader.timeout != 0:
                raise AssertionError(
                    "num_workers=0 loads in the training process, which cannot time out; use timeout=0"
                )
            self._workers: list[Any] = []
            self._close: Callable[[], Any] = lambda: None
            host: InlineRunner | EpochRunner = InlineRunner(_job(loader), self._ring, self._counters, indices)
        else:
            dispatch = _dispatch(loader)
            _begin_pass(loader)
            pool = _pool(loader, dispatch, base_seed, pinning.numa_node)
            self._workers = pool.processes
            runner = EpochRunner(
                job=_job(loader),
                pool=pool,
                ring=self._ring,
                dispatch=dispatch,
                counters=self._counters,
                in_order=loader.in_order,
                timeout_s=loader.timeout,
                max_deaths=loader._max_deaths,
                spare_slots=1 + pinning.slots_in_copies,
                regulator=loader._regulator,
            )
            runner.start()
            self._close = runner.close
            runner.begin(indices)
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
            )
        flight = self._runner.flight if isinstance(self._runner, Prefetcher) else None
        weakref.finalize(self, _end, flight, self._close, loader._shelf, self._ring).atexit = False
        self._start_epoch(loader, began)
        self._counters.loop = weakref.ref(self)

    def _start_epoch(self, loader: DataLoader[Any], began: int) -> None:
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
        _begin_pass(loader)
        self._host.begin(iter(self._index_sampler))
        self._start_epoch(loader, began)

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._index_sampler)

    def __next__(self) -> Any:
        counters = self._counters
        began = time.perf_counter_ns()
        if self._over:
            raise StopIteration
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
        finally:
            self._returned_at = time.perf_counter_ns()
            elsewhere = counters.wait_ns - waited + counters.inline_ns - made
            counters.transport_ns += self._returned_at - began - elsewhere
        if counters.recorder is not None:
            counters.recorder.add("next", began, self._returned_at, counters.epochs, self._yielded)
        self._yielded += 1
        if self._yielded == 1:
            counters.first_batch_ns = self._returned_at - self._began
        if self._iterable and self._promised is not None and self._yielded > self._promised:
            self._warn_of_length()
        return batch

    def _finish(self) -> None:
        self._over = True
        self._counters.epochs += 1
        if not self._persistent:
            self._shutdown_workers()

    def _shutdown_workers(self) -> None:
        """Stop the workers now (the name that Lightning and others call on torch's iterator)."""
        self._over = True
        self._close()

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


# ── wiring ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _check(*, workers: str, dispatch: str, errors: Any, max_deaths: int, ring_bytes: int | None) -> None:
    if workers not in ("process", "thread"):
        raise OptionError(f"workers must be 'process' or 'thread', not {workers!r}")
    if dispatch not in ("auto", "demand", "round_robin"):
        raise OptionError(f"dispatch must be 'auto', 'demand' or 'round_robin', not {dispatch!r}")
    if errors not in ("raise", "skip") and not callable(errors):
        raise OptionError(f"errors must be 'raise', 'skip' or a callable (exception, index) -> sample, not {errors!r}")
    if max_deaths < 1:
        raise OptionError(f"max_deaths must be at least 1, not {max_deaths}")
    if ring_bytes is not None and ring_bytes < 4096:
        raise OptionError(f"ring_bytes must be at least 4096 bytes (one page), not {ring_bytes}")


def _length(sampler: Any) -> int | None:
    with contextlib.suppress(Exception):  # a sampler of the user's may have no length, or one that fails
        return len(sampler)
    return None


def _auto_workers() -> int:
    return min(8, usable_cores() - 1)


def _order(source: Source, batch_size: int | None, workers: int, generator: torch.Generator | None) -> RunOrder | None:
    """Return a random order in which each worker reads runs of its own; None where a source has no runs."""
    starts = source.runs
    if starts is None or len(starts) < 3:
        return None
    return RunOrder(starts, batch_size=batch_size or 1, lanes=max(1, workers), generator=generator)


def _begin_pass(loader: DataLoader[Any]) -> None:
    if isinstance(loader.dataset, Stream) and loader._body == "process":
        loader.dataset.begin_pass()


def _job(loader: DataLoader[Any]) -> Job:
    assert loader.collate_fn is not None
    return Job(
        dataset=loader.dataset,
        collate_fn=loader.collate_fn,
        iterable=loader._dataset_kind == _DatasetKind.Iterable,
        auto_collation=loader._auto_collation,
        drop_last=loader.drop_last,
        errors=loader._errors,
        keep_batch_size=loader._keep_batch_size,
    )


def _context(loader: DataLoader[Any]) -> BaseContext:
    return loader.multiprocessing_context or multiprocessing.get_context()


def _start_method(loader: DataLoader[Any]) -> str:
    return _context(loader).get_start_method() or ""


def make_auto(loader: DataLoader[Any]) -> None:
    """Have a loader find its number of workers by itself, as num_workers="auto" does; before its first epoch.

    Batches stay the same for the loader's own number where samples can tell their worker. An iterable dataset keeps
    its number: it shares out its samples by it. Without a second core nothing changes.
    """
    counters = loader._counters
    if loader._dataset_kind == _DatasetKind.Iterable:
        counters.workers_reason = "fixed: an iterable dataset shares out its samples by the number of workers"
        return
    if isinstance(loader.dataset, MapDataPipe) or usable_cores() == 1:
        return
    if loader.num_workers == 0 and _start_method(loader) != "fork":
        return
    if loader.num_workers == 0:
        loader.num_workers = _auto_workers()
        loader.prefetch_factor = 2
    fixed = loader.num_workers
    most = max(fixed, min(_MOST_WORKERS, usable_cores()))
    loader._regulator = Regulator(workers=min(2, fixed), most=most, fixed=fixed)


def _pool(loader: DataLoader[Any], dispatch: Dispatch, base_seed: int, numa_node: int | None) -> Pool:
    job = _job(loader)
    workers, most = loader.num_workers, loader.num_workers
    if loader._regulator is not None:
        regulator = loader._regulator
        workers, most = regulator.choose() if dispatch.mode == "round_robin" else regulator.workers, regulator.most
        dispatch.size_up(workers)
    if loader._body == "thread":
        return ThreadPool(job, workers)
    return ProcessPool(
        job,
        workers,
        most=most,
        told=workers if dispatch.mode == "round_robin" else loader.num_workers,
        context=_context(loader),
        base_seed=base_seed,
        init_fn=loader.worker_init_fn,
        watch=_mode(loader)[0] == "probing",
        named=not memfd_works(),
        cores=cores_near(numa_node, most),
    )


def _mode(loader: DataLoader[Any]) -> tuple[Mode, str]:
    """Return how work is given out, and why, as far as that is known before the first batch."""
    if loader._dataset_kind == _DatasetKind.Iterable:
        return "stream", "an iterable dataset has its own samples in each worker"
    if loader._dispatch_option != "auto":
        return loader._dispatch_option, "asked for"
    if loader._body == "thread":
        return "demand", "threads share one dataset and one random state"
    if loader.num_workers == 1 and loader._regulator is None:
        return "round_robin", "there is one worker"
    if loader.worker_init_fn is not None:
        return "round_robin", "as torch assigns, because worker_init_fn may make workers differ"
    return "probing", "the first batch will show"


def _dispatch(loader: DataLoader[Any]) -> Dispatch:
    """Return what earlier epochs have learned, or begin to learn."""
    if loader._learned is None:
        mode, reason = _mode(loader)
        splittable = _job(loader).rows_can_be_split
        assert loader.prefetch_factor is not None
        loader._learned = Dispatch(
            mode,
            reason,
            workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            splittable=splittable,
        )
    elif loader._regulator is not None:  # another iterator may still run, with another number of workers
        loader._learned = copy.copy(loader._learned)
    return loader._learned


def _borrow_ring(loader: DataLoader[Any], pinning: Pinning) -> Ring:
    """Return a ring that no other iterator of this loader uses."""
    loader._ring = loader._shelf.take()
    if loader._ring is not None:
        return loader._ring
    in_process = loader.num_workers == 0 or loader._body == "thread"
    named = not in_process and not memfd_works()
    make: Callable[[int], Slab] = PrivateSlab if in_process else functools.partial(create, named=named)
    if pinning.numa_node is not None:
        make = functools.partial(_make_near, make, pinning.numa_node)
    budget = loader._ring_bytes or max(64 << 20, available_nbytes() // 4)
    loader._ring = Ring(
        make,
        budget,
        sparse=not named,
        pin=pinning.pin,
        pin_budget_nbytes=pinnable_nbytes() if pinning.pin is not None else None,
        fence=pinning.fence,
    )
    return loader._ring


def _make_near(make: Callable[[int], Slab], node: int, nbytes: int) -> Slab:
    slab = make(nbytes)
    prefer_memory(slab.memory, node)
    return slab


def _end(flight: Flight | None, close: Callable[[], Any], shelf: _Shelf, ring: Ring) -> None:
    if flight is not None:
        flight.close()  # its copies read the ring's slots
    close()
    shelf.put(ring)


class _Shelf:
    """Keeps the ring of the last epoch for the next one, as long as its loader lives."""

    def __init__(self) -> None:
        self._ring: Ring | None = None
        self._closed = False

    def take(self) -> Ring | None:
        """Return the ring that was put here, if any."""
        ring, self._ring = self._ring, None
        return ring

    def put(self, ring: Ring) -> None:
        """Keep `ring`, or close it when there is no use for it."""
        if self._closed or self._ring is not None:
            ring.close()
        else:
            self._ring = ring

    def close(self) -> None:
        """Close what is here, and from now on what is put here."""
        self._closed = True
        if self._ring is not None:
            self._ring.close()
            self._ring = None
