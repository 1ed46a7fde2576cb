"""DataLoader: torch's signature, wired to the road of a batch."""

from __future__ import annotations

import operator
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.context import BaseContext
from typing import Any, Literal, TypeVar

import torch
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, IterDataPipe, MapDataPipe, Sampler
from torch.utils.data.dataloader import _DatasetKind

from penstock.core.errors import OptionError, StateError
from penstock.core.host import usable_cores
from penstock.core.stats import LoaderStatistics, RingCounts
from penstock.device import Device, device_of
from penstock.distributed.place import place
from penstock.feed.auto import Regulator
from penstock.feed.counters import Counters
from penstock.feed.course import Course, state_of
from penstock.feed.depth import DepthTrial
from penstock.feed.dispatch import Dispatch
from penstock.feed.iteration import LoaderIterator
from penstock.feed.orders import Order, Other, drawn_from, order_for
from penstock.feed.prefetch import DEPTH
from penstock.feed.shares import RankSampler, Share, Uneven, check_uneven
from penstock.feed.sources.base import Source
from penstock.feed.sources.order import RunOrder
from penstock.feed.sources.stream import Stream
from penstock.feed.state import Resume, Seen, belonging, check, resume_of
from penstock.feed.transport.ring import Ring
from penstock.feed.wiring import Shelf, start_method
from penstock.feed.workers.maker import ErrorPolicy, is_stateful
from penstock.feed.workers.ray_cluster import Cluster

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
            (least, most), for workers="ray" only: the same, between these bounds.
        workers: "process"; "thread" for datasets that release the GIL; or "ray": actors on the machines of the Ray
            cluster that this machine is part of ("ray://host:port": of the one whose client server that is).
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
        seed: makes all that is random depend on it, the epoch and the sample's index only, whatever the workers: the
            order (for `shuffle=True`), `penstock.sample_rng()`, and torch's, Python's and NumPy's random states, with
            which each sample is then made (not by threads, which share them). See `penstock.sample_seed`.
        distributed: share the samples out over the ranks of torchrun or of `torch.distributed` (or of the process
            group that is given), as torch's DistributedSampler does, from epoch to epoch without `set_epoch`.
        uneven: with `distributed`, what to do where the samples are not as many for each rank: "pad" (repeat the first
            ones), "drop" (leave the rest out), or "join" (some ranks get one more; see
            `torch.distributed.algorithms.Join`).
        snapshot_every_n_steps: of an iterable dataset that keeps a state, how often it is asked for it, in batches of
            a worker; the batches since are made again when a state is gone on from. As in torchdata.

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
        num_workers: int | tuple[int, int] | Literal["auto"] = 0,
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
        workers: Literal["process", "thread", "ray"] | str = "process",
        dispatch: Literal["auto", "demand", "round_robin"] = "auto",
        errors: ErrorPolicy = "raise",
        keep_batch_size: bool = False,
        max_deaths: int = 3,
        ring_bytes: int | None = None,
        device: str | torch.device | Device | None = None,
        device_bytes: int = 512 << 20,
        seed: int | None = None,
        distributed: bool | ProcessGroup = False,
        uneven: Uneven = "pad",
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        check_uneven(uneven)
        _check(workers=workers, dispatch=dispatch, errors=errors, max_deaths=max_deaths, ring_bytes=ring_bytes)
        self.seed = _seed(seed)
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self._distributed = distributed is not False
        self._epoch = 0
        self._resume: Resume | None = None
        self._loaded: dict[str, Any] | None = None
        self._course: Course | None = None
        self._body = "ray" if workers.startswith("ray://") else workers
        self._cluster_address = workers if workers.startswith("ray://") else None
        self._cluster: Cluster | None = None
        bounds = _bounds(num_workers, self._body)
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
        group = None if isinstance(distributed, bool) else distributed
        is_iterable = isinstance(dataset, IterableDataset)
        self.rank, self.world_size = place(group) if distributed or is_iterable else (0, 1)
        if self.rank < 0:
            raise OptionError("distributed= is a process group that this process is not in; give the one that it is in")
        lanes = bounds[1]
        draws_itself = sampler is None and batch_sampler is None and not is_iterable
        if distributed and not draws_itself:
            _refuse_to_share(dataset)
        runs = None
        if shuffle and draws_itself and isinstance(dataset, Source):
            runs = _order(dataset, batch_size, lanes * self.world_size, generator)
        if draws_itself and (distributed or (seed is not None and shuffle)):
            block = (batch_size or 1) if runs is not None else 1
            share = Share(rank=self.rank, world=self.world_size, block=block, uneven=uneven)
            sampler = RankSampler(dataset, share, shuffle=bool(shuffle), seed=self.seed or 0, runs=runs)
            shuffle = None
        elif runs is not None:
            sampler, shuffle = runs, None
        if runs is not None and dispatch == "auto":
            self._dispatch_option = "round_robin"
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
        self._order = order_for(self._index_sampler, snapshot_every=snapshot_every_n_steps or 1)
        self._seen: Seen | None = None
        # A stream's state is small and quickly told, and only with one of its own can a lane be shared out anew.
        self._snapshot_every = 1 if isinstance(dataset, Stream) else snapshot_every_n_steps or 0
        if isinstance(num_workers, tuple):
            least, most = bounds
            self._regulator = Regulator(workers=max(1, least), most=most, fixed=max(1, least))
            self._regulator.least = least
        elif num_workers == "auto":
            make_auto(self)
        for observer in observers:
            observer(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _ring=None, _shelf=Shelf(), _learned=None, _counters=Counters(), _iterator=None)
        self._course = self._cluster = None
        self._order = order_for(self._index_sampler, snapshot_every=self.snapshot_every_n_steps or 1)
        weakref.finalize(self, self._shelf.close)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: rings, counters, a persistent iterator."""
        own = ("_ring", "_shelf", "_learned", "_counters", "_iterator", "_course", "_cluster", "_order")
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

    @property
    def _kept_order(self) -> Order | None:
        return self._order if self._dataset_kind == _DatasetKind.Map else None

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is: which samples of this epoch have been handed out.

        It is small, whatever the position, and of the pass that was begun last. Take it between two batches; a batch
        that raised counts as not handed out until a later one is. Save one for each rank (or rank 0's only, for
        map-style datasets with `in_order=True`, where all ranks take as many batches).

        >>> import torch
        >>> loader = DataLoader(torch.arange(6), batch_size=2, num_workers=2)
        >>> batches = iter(loader)
        >>> next(batches)
        tensor([0, 1])
        >>> state = loader.state_dict()
        >>> other = DataLoader(torch.arange(6), batch_size=2)
        >>> other.load_state_dict(state)
        >>> list(other)
        [tensor([2, 3]), tensor([4, 5])]
        """
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            raise StateError("legacy DataPipes have no state here; use an IterableDataset, or `penstock.open`")
        return self._loaded if self._loaded is not None else state_of(self)

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Have the next pass go on where a state was taken, with exactly the samples that were not handed out then.

        The workers, their number, the body, the batch size and the number of ranks may be others. Nothing is made
        again, but for iterable datasets that keep no state: those are run through, from the beginning.

        Args:
            state: what `state_dict` has returned; of all ranks, where one rank's does not say all. {} changes nothing.

        Raises:
            StateError: it is of another dataset or sampler, or of another format, or states of other ranks are needed.
        """
        states = list(state["ranks"] if isinstance(state, Mapping) and "ranks" in state else _listed(state))
        if not states or not states[0]:
            return
        sampler = drawn_from(self._index_sampler)
        check(states, belonging(self.dataset, sampler, self._kept_order), Seen.of(self.dataset, sampler))
        if isinstance(self._kept_order, Other) and len(states) > 1:
            rank, world = place()  # its sampler shares out among ranks by itself
            if len(states) != world:
                raise StateError(f"here are {len(states)} states, and there are {world} ranks; load each rank's own")
            states = [states[rank]]
        stream = self.dataset if isinstance(self.dataset, Stream) else None
        order = order_for(self._index_sampler, snapshot_every=1) if self._dataset_kind == _DatasetKind.Map else None
        self._resume = resume_of(
            states,
            order=order,
            rank=self.rank,
            world=self.world_size,
            stream=stream,
            workers=self.num_workers,
        )
        if self._resume.sampler is not None:
            self._order.begin_after(self._resume.sampler)
        if self._body == "thread" and stream is None and any(lane.of > 1 for lane in self._resume.lanes or ()):
            raise StateError(
                "the workers of this state were told by get_worker_info() which they are, and threads cannot be; go on "
                "with workers='process', or num_workers=0"
            )
        _say_what_it_costs(self._resume, self.dataset)
        self._loaded = dict(states[0]) if len(states) == 1 else {"ranks": states}

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`; without it they count by themselves, from 0."""
        self._epoch = epoch

    def check_worker_number_rationality(self) -> None:
        """Warn, as torch's loader does, of more workers than this machine has cores; a cluster has more."""
        if self._body != "ray":
            super().check_worker_number_rationality()

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


def _listed(state: Any) -> Sequence[Any]:
    if isinstance(state, Mapping):
        return [state]
    if not isinstance(state, Sequence) or not all(isinstance(one, Mapping) for one in state):
        raise StateError(f"a state is a dict, or a list of those of all ranks, and not {str(state)[:100]}")
    return state


def _say_what_it_costs(resume: Resume, dataset: Any) -> None:
    lost = [lane.since for lane in resume.lanes or () if lane.state is None and lane.since]
    if lost and not is_stateful(dataset):
        samples = sum(batches * size for since in lost for batches, size in since)
        warnings.warn(
            f"{type(dataset).__qualname__} has no state_dict and load_state_dict, nor had its iterator told a state: "
            f"the first {samples} samples of this epoch are made again, and thrown away, before its next batch",
            stacklevel=3,
        )


def _refuse_to_share(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset):
        if not isinstance(dataset, Stream):
            raise OptionError(
                "distributed=True cannot share out the samples of an iterable dataset: let it do so by its rank, or "
                "use penstock.open(...).stream(), which does"
            )
        return
    raise OptionError(
        "distributed=True draws the order itself, and leaves no place for a sampler or batch_sampler; leave them out, "
        "or have them share out their samples and leave out distributed=True"
    )


def _seed(seed: Any) -> int | None:
    try:
        return None if seed is None else operator.index(seed)
    except TypeError as error:
        raise OptionError(f"seed must be a whole number or None, not {seed!r}") from error


def _check(*, workers: str, dispatch: str, errors: Any, max_deaths: int, ring_bytes: int | None) -> None:
    if workers not in ("process", "thread", "ray") and not str(workers).startswith("ray://"):
        raise OptionError(f"workers must be 'process', 'thread', 'ray' or 'ray://host:port', not {workers!r}")
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


def _bounds(num_workers: int | tuple[int, int] | Literal["auto"], body: str) -> tuple[int, int]:
    """Return the fewest and the most workers there may be."""
    if num_workers == "auto" and body == "ray":
        raise OptionError(
            "how many machines a cluster may grow to is not for a loader to guess: with workers='ray' give "
            "num_workers=(least, most) instead of 'auto'"
        )
    if num_workers == "auto":
        return 0, _auto_workers()
    if not isinstance(num_workers, tuple):
        return num_workers, num_workers
    least, most = num_workers
    if body != "ray" or not 0 <= least <= most or most < 1:
        raise OptionError(
            f"num_workers={num_workers!r} must be (least, most) with 0 <= least <= most, and workers='ray'; give one "
            "number, or 'auto', for workers on this machine"
        )
    return least, most


def _order(source: Source, batch_size: int | None, workers: int, generator: torch.Generator | None) -> RunOrder | None:
    """Return a random order in which each worker reads runs of its own; None where a source has no runs."""
    starts = source.runs
    if starts is None or len(starts) < 3:
        return None
    return RunOrder(starts, batch_size=batch_size or 1, lanes=max(1, workers), generator=generator)
