"""DataLoader: torch's signature; a thin face over a LoaderConfig and a LoaderRuntime.

It has torch's methods and no state: scripts and frameworks look for `state_dict` or `set_epoch` and save or call what
they find, so under `penstock run` a loader must not have more than torch's. `penstock.DataLoader` (stateful_loader.py)
adds them.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing.context import BaseContext
from operator import attrgetter
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, MapDataPipe, Sampler
from torch.utils.data import dataloader as torch_module

from penstock.core.host import cores_of_rank
from penstock.core.signals.interrupts import uninterrupted_finalizer
from penstock.core.stats import LoaderStatistics
from penstock.device import Device
from penstock.distributed.rank import Distributed
from penstock.loader.config import LoaderConfig, WorkerType, auto_workers, check_can_distribute
from penstock.loader.fallback import why_torch_iterator
from penstock.loader.import_hooks import on_import
from penstock.loader.in_memory import CannotGatherError, gather_of
from penstock.loader.iterator import LoaderIterator, make_iterator, next_iterator
from penstock.loader.runtime import LoaderRuntime
from penstock.loader.sampling.orders import drawn_from, has_lazy_iterator, order_for
from penstock.loader.sampling.own_sampler import own_sampler, reads_chunks
from penstock.loader.sampling.sharding import Uneven
from penstock.loader.sampling.unknown_order import UnknownOrder
from penstock.loader.scheduling.auto_workers import AutoWorkers
from penstock.loader.scheduling.purity import why_impure
from penstock.loader.workers.worker_spec import ErrorPolicy

T_co = TypeVar("T_co", covariant=True)

_MOST_WORKERS = 16

MOST_WAITING_WORKERS = 64
"""A forked worker takes 6 to 15 MiB of its own and 25 ms to start; `FirstBatch` looks at the memory besides."""

_MOST_GATHERED_NBYTES = 8 << 20
"""Of a batch; gathering takes 1 or 2 ms for so many."""

_TORCH_ATTRIBUTES = {
    "dataset": "dataset",
    "sampler": "sampler",
    "batch_sampler": "batch_sampler",
    "drop_last": "drop_last",
    "num_workers": "num_workers",
    "collate_fn": "collate_fn",
    "timeout": "timeout",
    "worker_init_fn": "worker_init_fn",
    "multiprocessing_context": "multiprocessing_context",
    "generator": "generator",
    "prefetch_factor": "prefetch_factor",
    "persistent_workers": "persistent_workers",
    "pin_memory_device": "pin_memory_device",
    "in_order": "in_order",
    "_IterableDataset_len_called": "announced_length",
}
"""Attributes of torch's loader that its iterator reads, and the fields of LoaderConfig that follow them when a pass
begins: torch lets a program set most of these between two passes, and some programs find a way past its refusal."""

_GET_ATTRIBUTES, _GET_FIELDS = attrgetter(*_TORCH_ATTRIBUTES), attrgetter(*_TORCH_ATTRIBUTES.values())

_ORDERING = {"dataset", "sampler", "batch_sampler", "drop_last"}

_CHECK_WORKERS = compile("check()", torch_module.__file__, "eval")
"""A line that is torch's to all who look at frames: the warning comes from there, and a program's filters meet it."""

_TRACE_RULES = "torch._dynamo.trace_rules"

observers: list[Callable[[DataLoader[Any]], None]] = []
"""Called with every DataLoader at the end of its construction."""


def _pass_over_in_dynamo() -> None:
    """Have torch.compile trace nothing of penstock's, as it traces nothing of torch.utils.data.

    Steps are left out of this: what they wrap may be compiled as a whole.
    """
    trace_rules = sys.modules[_TRACE_RULES]
    if hasattr(trace_rules, "add"):  # another version of torch may have another way
        for folder in (
            "cluster",
            "core",
            "data",
            "device",
            "distributed",
            "inference",
            "launch",
            "loader",
            "observe",
            "tune",
        ):
            trace_rules.add(f"penstock.{folder}")


on_import(_TRACE_RULES, _pass_over_in_dynamo)


class DataLoader(TorchDataLoader[T_co]):
    """torch's `DataLoader`, with its arguments and its batches, on a ring of reused slots.

    Batches equal those of `torch.utils.data.DataLoader` for the same arguments and the same generator: same order,
    same types, same bytes. Their tensors are views of a slot. A slot is reused when the last view of it has died, so
    keeping batches is safe (`list(loader)` works; batches that exceed `ring_bytes` are copied out).

    Args:
        dataset: `dataset[index]` and `len(dataset)`, or an iterable dataset. This argument and all that follow up to
            `in_order` mean what they mean in torch's DataLoader; what penstock adds to one is said with it.
        batch_size: samples of a batch; None hands out samples one by one, as they are.
        shuffle: a new random order in each epoch.
        sampler: yields the indices of an epoch, in place of `shuffle`.
        batch_sampler: yields lists of indices, in place of `batch_size`, `shuffle`, `sampler` and `drop_last`.
        num_workers: how many workers make batches; 0: this process makes them. "auto": the number changes while the
            loop runs, until the step does not wait. It is at most one for each core that this process may use (by
            affinity and cgroup quota) and at most 16; at most 64 where workers are seen to wait (for a disk, a network)
            more than they compute; and none after an epoch that this process would have made sooner. Where samples may
            depend on their worker, which is everywhere but on demand (see `dispatch`), the number changes only between
            epochs, and the batches of an epoch are torch's for its number. The first epoch has one for each core, at
            most 16, or more if worker 0 waits while it makes the first batch, and only as many as a quarter of the
            available memory holds; if a sample asks for the number before that is known, one fewer than the cores, at
            most 8. So does an iterable dataset.
            `statistics().workers_reason` gives the reason. No worker is started, whatever the number, for tensors,
            arrays, numbers, and a TensorDataset, Subset or ConcatDataset of them, with torch's collate function and
            batches of at most 8 MiB: gathering such a batch takes less time than handing it over.
            `dispatch="round_robin"` has the workers nonetheless.
            (least, most), for worker_type="ray" only: the same, between these bounds.
        collate_fn: makes a batch of a list of samples; by default tensors, arrays and numbers are stacked.
        drop_last: leave out a last batch that is not full.
        timeout: the seconds that a batch may take before WorkerTimeoutError; 0 for any.
        worker_init_fn: is called with the worker's number when a worker begins.
        multiprocessing_context: "fork", "forkserver", "spawn", or a context: how worker processes are started.
        generator: draws the order and the seeds of workers; by default torch's global one.
        prefetch_factor: how many batches each worker may be ahead; 2 by default.
        persistent_workers: keep workers from epoch to epoch.
        pin_memory_device: torch's; deprecated there.
        in_order: hand out batches in the order of the sampler; False: as they are ready.
        worker_type: "process"; "thread" for datasets that release the GIL (`worker_init_fn` is called once in each
            thread, and changes no random state: threads share those of the process); or "ray": actors on the machines
            of the Ray cluster to which this machine belongs ("ray://host:port": the cluster behind that client server).
        dispatch: which worker makes which batch. "round_robin": as in torch, batch k is made by worker k mod n, so that
            a dataset that keeps a state (a generator, a counter, a cache) gives the same samples. "demand": a free
            worker takes the next batch, and several workers fill a large one together. That is faster where samples
            are uneven or batches dear, and lets num_workers="auto" follow the loop at once; but samples that depend on
            what their worker has made before, or on which worker it is, then differ from run to run. "auto": on
            demand only if it is proven that no sample does (dataset and collate_fn are torch's or penstock's and hold
            plain data; see `penstock.loader.scheduling.purity`) or the program says so by `seed=`; else round_robin.
            `statistics().dispatch_reason` gives the reason. Threads share one dataset, and always work on demand.
        errors: what to do with a sample that raises: "raise", "skip" (leave it out and count it), or a callable
            `(exception, index) -> sample` whose result replaces it (`penstock.SKIP` leaves it out). Where ranks share
            out the samples, a batch of which nothing is left raises RankError, unless uneven="join".
        max_worker_crashes: how many worker processes may crash on one sample; then the sample is quarantined: it
            raises WorkerKilledError, or is left out with errors="skip". Until then a successor makes the lost batches
            again. It begins as its predecessor began, with the dataset and random states of then; unless batches are
            made on demand, a RuntimeWarning says so. (Streams are read again up to their position.)
        ring_bytes: the most bytes of slots for batches under way and held by the program, as in "2GiB" or 2 << 30; by
            default a quarter of the available memory.
        pin_memory: as in torch's, on pinned slots: a batch is not copied to be pinned, and its slot is not reused
            before copies that the program started from it are over, on whatever stream. A `penstock.device.Device` pins
            for that device.
        device: "cuda", "cuda:1", any other accelerator of torch's, "cpu", or "sim" (a simulated one). Batches arrive
            there, copied ahead on a side stream from pinned slots, ordered on the current stream.
        device_bytes: with `device`, the most device memory for batches that are copied ahead, as in "512MiB".
        seed: makes everything random depend on the seed, the epoch and the sample's index only, whatever the workers:
            the order (with `shuffle=True`; that of more than 2 ** 21 samples is computed by index, in constant memory
            and without a start-up, and shorter ones are those of torch's DistributedSampler),
            `penstock.sample_rng()`, and torch's, Python's and NumPy's random states
            for each sample (not with threads, which share these states). See `penstock.sample_seed`. A generator of
            the dataset's own is not seeded: with one, give dispatch="round_robin", or draw from `sample_rng()`.
        distributed: share out the samples over the ranks of torchrun or of `torch.distributed`, as torch's
            DistributedSampler does, and count epochs without `set_epoch`. A process group, or a DeviceMesh of one
            dimension (`mesh["dp"]`): over its ranks, so that ranks at the same place of their groups, as those of one
            tensor-parallel replica, get the same samples (with `seed=`, the same random changes of them, too), always
            in order.
        uneven: with `distributed`, what to do if the samples cannot be shared out evenly: "pad" (repeat the first
            ones), "drop" (leave out the rest), or "join" (some ranks get one more, or of a stream several; see
            `torch.distributed.algorithms.Join`). Ranks of a stream tell each other, every four batches, how many they
            have, over the store of `init_process_group`.
        snapshot_every_n_steps: how often an iterable dataset with a state is asked for it, in batches of a worker.
            The batches since then are made again when a state is resumed. As in torchdata.

    Raises:
        OptionError: an argument of penstock's own has a value that it cannot have. Torch's own arguments raise what
            torch raises.

    Example:
        >>> import torch
        >>> loader = DataLoader(torch.arange(10.0), batch_size=4)
        >>> [batch.tolist() for batch in loader]
        [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0]]
        >>> loader.statistics().samples
        10
    """

    _counts_epochs: ClassVar[bool] = False

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | tuple[int, int] | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | Device = False,
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
        worker_type: Literal["process", "thread", "ray"] | str = "process",
        dispatch: Literal["auto", "demand", "round_robin"] = "auto",
        errors: ErrorPolicy = "raise",
        max_worker_crashes: int = 3,
        ring_bytes: int | str | None = None,
        device: str | torch.device | Device | None = None,
        device_bytes: int | str = 512 << 20,
        seed: int | None = None,
        distributed: Distributed = False,
        uneven: Uneven = "pad",
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        config = LoaderConfig.from_arguments(
            dataset=dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            pin_memory=pin_memory,
            drop_last=drop_last,
            generator=generator,
            worker_type=worker_type,
            dispatch=dispatch,
            errors=errors,
            max_worker_crashes=max_worker_crashes,
            ring_bytes=ring_bytes,
            device=device,
            device_bytes=device_bytes,
            seed=seed,
            distributed=distributed,
            uneven=uneven,
            snapshot_every_n_steps=snapshot_every_n_steps,
            counts_epochs=self._counts_epochs,
        )
        config = _with_own_sampler(config)
        super().__init__(
            dataset,
            batch_size,
            config.shuffle,
            config.sampler,
            batch_sampler,
            config.num_workers,
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
        completed = {field: getattr(self, name) for name, field in _TORCH_ATTRIBUTES.items()}
        self._start_runtime(replace(config, **completed))
        self.check_worker_number_rationality()
        if config.worker_bounds is not None:
            least, most = config.worker_bounds
            auto = AutoWorkers(workers=max(1, least), most=most, least=max(1, least))
            self._penstock_runtime.auto_workers, auto.is_persistent = auto, persistent_workers
        elif config.is_auto:
            enable_autoscaling(self)
        for observer in observers:
            observer(self)

    def _start_runtime(self, config: LoaderConfig, **carried: Any) -> None:
        order = order_for(config.index_sampler, snapshot_every=config.snapshot_every_n_steps or 1)
        # One attribute with a name that no subclass uses; `runtime_of` and `config_of` are for the other modules.
        drawn = drawn_from(config.index_sampler)
        self._penstock_runtime = LoaderRuntime(config=config, order=order, drawn=drawn, **carried)
        weakref.finalize(self, uninterrupted_finalizer(self._penstock_runtime.resources.close))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: rings, counters, a persistent iterator."""
        runtime = self.__dict__.get("_penstock_runtime")
        if runtime is None:  # a subclass with a constructor of its own, such as torchdata's
            return self.__dict__
        return {**self.__dict__, "_penstock_runtime": runtime.carried(), "_iterator": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "_penstock_runtime" in state:
            self._start_runtime(**state["_penstock_runtime"])

    def statistics(self) -> LoaderStatistics:
        """Return what has been counted so far: times by stage, stalls, slots, crashes, skipped samples."""
        return self._penstock_runtime.statistics()

    def check_worker_number_rationality(self) -> None:
        """Warn, as torch's loader does, of more workers than this machine has cores; a cluster has more."""
        # torch's constructor calls this too early for us
        if _has_runtime(self) and config_of(self).worker_type != "ray":
            eval(_CHECK_WORKERS, vars(torch_module), {"check": super().check_worker_number_rationality})

    def __iter__(self) -> Any:
        kept = self._iterator  # where workers persist
        if isinstance(kept, LoaderIterator):
            follow_attributes(self)
            if why_torch_iterator(config_of(self), self):
                kept._shutdown_workers()  # a patch that came since asks for torch's
                self._iterator = None
            else:
                self._iterator = next_iterator(kept)
        return super().__iter__()

    def _get_iterator(self) -> Any:
        follow_attributes(self)
        _leave_workers(self)
        reason = runtime_of(self).counters.fallback_reason = why_torch_iterator(config_of(self), self)
        if reason:
            return super()._get_iterator()
        if self.num_workers > 0:
            self.check_worker_number_rationality()
        return make_iterator(runtime_of(self))


def _has_runtime(loader: DataLoader[Any]) -> bool:
    try:
        object.__getattribute__(loader, "_penstock_runtime")  # a subclass's __getattr__ may need what is not there yet
    except AttributeError:
        return False
    return True


def follow_attributes(loader: DataLoader[Any]) -> LoaderConfig:
    """Return the loader's config, with the attributes that the program has set since the last pass."""
    runtime = runtime_of(loader)
    config, changed = runtime.config, {}
    values, known = _GET_ATTRIBUTES(loader), _GET_FIELDS(config)
    if not all(map(operator.is_, values, known)):
        fields = zip(_TORCH_ATTRIBUTES.values(), values, known, strict=True)
        changed = {field: value for field, value, before in fields if value is not before}
    if bool(config.pin_memory) != loader.pin_memory:  # of which penstock knows more values than torch
        changed["pin_memory"] = loader.pin_memory
    if changed:
        runtime.config = replace(config, **changed)
        if not _ORDERING.isdisjoint(changed):
            runtime.drawn = None
    return runtime.config


def _leave_workers(loader: DataLoader[Any]) -> None:
    """Have batches made in this process from now on, where "auto" has found that workers cost more than they make."""
    runtime = runtime_of(loader)
    auto = runtime.auto_workers
    if auto is None or not _may_leave_workers(loader) or config_of(loader).worker_type != "process":
        return
    if isinstance(runtime.order, UnknownOrder) and not has_lazy_iterator(loader._index_sampler):
        return  # with workers it is asked for a second iterator, as torch does, and each may draw another order
    reason = auto.why_no_workers()
    if reason:
        runtime.auto_workers = None
        _make_in_this_process(loader, reason, auto.asked)


def _make_in_this_process(loader: DataLoader[Any], reason: str, asked: int | None) -> None:
    loader.num_workers, loader.prefetch_factor = 0, None
    follow_attributes(loader)
    asked_text = f"; the script asked for {asked}" if asked else ""
    counters = runtime_of(loader).counters
    counters.workers, counters.workers_reason = 0, f"auto: {reason}{asked_text}"


def _may_leave_workers(loader: DataLoader[Any]) -> bool:
    """Return whether nothing was asked of workers; with a context, say, a loader made of these arguments would fail."""
    config, context = config_of(loader), loader.multiprocessing_context
    is_asked = config.persistent_workers or config.timeout != 0 or config.worker_init_fn is not None
    return context is None and not is_asked


def _is_gathered(loader: DataLoader[Any]) -> bool:
    """Return whether a batch is one gather of data in memory, and no more bytes than this process gathers at once.

    A worker would gather it as well, and then send it. For larger batches that may be hidden behind a step.
    """
    config, batch_size = config_of(loader), getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(batch_size, int):
        return False
    gather = gather_of(config.dataset) if not why_impure(config.worker_spec) and len(config.dataset) else None
    if gather is None:
        return False
    try:
        row = gather([0])
    except CannotGatherError:  # a Subset by an array of NumPy's, say
        return False
    columns = [row] if isinstance(row, torch.Tensor) else row
    return batch_size * sum(column.nbytes for column in columns) <= _MOST_GATHERED_NBYTES


def config_of(loader: DataLoader[Any]) -> LoaderConfig:
    """Return a loader's arguments as they were when its last pass began; see `follow_attributes`."""
    return loader._penstock_runtime.config


def runtime_of(loader: DataLoader[Any]) -> LoaderRuntime:
    """Return what changes while a loader runs."""
    return loader._penstock_runtime


def find_runtime(loader: object) -> LoaderRuntime | None:
    """Return a loader's runtime; None for what is no loader of penstock's, or has a constructor of its own."""
    found: LoaderRuntime | None = getattr(loader, "_penstock_runtime", None)
    return found


def worker_type_of(loader: TorchDataLoader[Any]) -> WorkerType:
    """Return what a loader's workers are; torch's own always has processes."""
    return config_of(loader).worker_type if isinstance(loader, DataLoader) else "process"


def can_autoscale(loader: object) -> bool:
    """Return whether penstock's iterator runs for this loader, so that its number of workers may change."""
    if not isinstance(loader, DataLoader) or type(loader)._get_iterator is not DataLoader._get_iterator:
        return False
    return not why_torch_iterator(config_of(loader), loader)


def enable_autoscaling(loader: DataLoader[Any], *, asked: int | None = None) -> None:
    """Let the number of workers change while the loop runs, as num_workers="auto" does; before the first epoch.

    Where samples may depend on their worker, it changes only between epochs. It begins with the loader's own, unless
    the first batch is seen to wait. An iterable dataset keeps its number, because it shares out its samples by it.
    Without a second core nothing changes.

    Args:
        loader: whose number may change.
        asked: the number that a script has asked for, which is then named beside the reason for another.
    """
    config, runtime = config_of(loader), runtime_of(loader)
    if config.is_iterable:
        runtime.counters.workers_reason = "fixed: an iterable dataset shares out its samples by the number of workers"
        return
    if config.keeps_state:
        runtime.counters.workers_reason = "fixed: the dataset keeps a state in each worker"
        return
    if isinstance(config.dataset, MapDataPipe) or cores_of_rank() == 1:
        return
    if _may_leave_workers(loader) and _is_gathered(loader):
        _make_in_this_process(loader, "a batch is gathered in memory, sooner than a worker could send it", asked)
        return
    if config.num_workers == 0:
        if config.start_method != "fork":
            return
        loader.num_workers, loader.prefetch_factor = auto_workers(), 2
        follow_attributes(loader)
    fixed = loader.num_workers
    most = max(fixed, min(_MOST_WORKERS, cores_of_rank()))
    most_waiting = max(most, MOST_WAITING_WORKERS)
    auto = runtime.auto_workers = AutoWorkers(workers=fixed, most=most, most_waiting=most_waiting)
    auto.asked, auto.is_persistent = asked, config.persistent_workers


def _with_own_sampler(config: LoaderConfig) -> LoaderConfig:
    """Return the config with the sampler that penstock draws from, where torch's own would not do."""
    check_can_distribute(config)
    if not config.draws_own_order:
        return config
    sampler = own_sampler(
        config.dataset,
        batch_size=config.batch_size,
        shuffle=bool(config.shuffle),
        workers=config.num_workers,
        generator=config.generator,
        seed=config.seed,
        rank=config.rank,
        world_size=config.world_size,
        is_distributed=config.is_distributed,
        uneven=config.uneven,
    )
    if sampler is None:
        return config
    is_dealt = reads_chunks(sampler) and config.dispatch == "auto"
    return replace(config, sampler=sampler, shuffle=None, dispatch="round_robin" if is_dealt else config.dispatch)
