"""DataLoader: torch's signature, wired to the road of a batch."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterDataPipe, MapDataPipe, Sampler
from torch.utils.data.dataloader import _DatasetKind

from penstock.core.errors import OptionError
from penstock.core.host import usable_cores
from penstock.core.stats import LoaderStatistics, RingCounts
from penstock.device import Device, device_of
from penstock.feed.auto import Regulator
from penstock.feed.counters import Counters
from penstock.feed.depth import DepthTrial
from penstock.feed.dispatch import Dispatch
from penstock.feed.iteration import LoaderIterator
from penstock.feed.prefetch import DEPTH
from penstock.feed.sources.base import Source
from penstock.feed.sources.order import RunOrder
from penstock.feed.transport.ring import Ring
from penstock.feed.wiring import Shelf, start_method
from penstock.feed.workers.maker import ErrorPolicy

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
        self._shelf = Shelf()
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
        self.__dict__.update(state, _ring=None, _shelf=Shelf(), _learned=None, _counters=Counters(), _iterator=None)
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
            start_method=start_method(self) if with_workers and self._body == "process" else "",
            workers=self.num_workers,
        )

    def _get_iterator(self) -> Any:
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)) or not hasattr(os, "register_at_fork"):
            # Legacy DataPipes shard and shuffle through torch's own iterator; on Windows there are no socket pairs.
            return super()._get_iterator()
        if self.num_workers > 0:
            self.check_worker_number_rationality()
        return LoaderIterator(self)


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
    if loader.num_workers == 0 and start_method(loader) != "fork":
        return
    if loader.num_workers == 0:
        loader.num_workers = _auto_workers()
        loader.prefetch_factor = 2
    fixed = loader.num_workers
    most = max(fixed, min(_MOST_WORKERS, usable_cores()))
    loader._regulator = Regulator(workers=min(2, fixed), most=most, fixed=fixed)


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


def _auto_workers() -> int:
    return min(8, usable_cores() - 1)


def _order(source: Source, batch_size: int | None, workers: int, generator: torch.Generator | None) -> RunOrder | None:
    """Return a random order in which each worker reads runs of its own; None where a source has no runs."""
    starts = source.runs
    if starts is None or len(starts) < 3:
        return None
    return RunOrder(starts, batch_size=batch_size or 1, lanes=max(1, workers), generator=generator)
