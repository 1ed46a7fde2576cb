"""LoaderConfig: every argument of a DataLoader, checked once, and what follows from the arguments alone."""

from __future__ import annotations

import functools
import multiprocessing
import operator
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from penstock.core.errors import OptionError
from penstock.core.host import cores_of_rank
from penstock.core.units import to_nbytes
from penstock.data.source import Source
from penstock.data.stream import Stream
from penstock.device import Device, device_of
from penstock.distributed.rank import Distributed, place_in, rank_and_world_size, ranks_of
from penstock.loader.sampling.sharding import Uneven, check_uneven
from penstock.loader.to_device.pinning import PinMemory
from penstock.loader.workers.worker_spec import ErrorPolicy, WorkerSpec, is_stateful

WorkerType = Literal["process", "thread", "ray"]
DispatchOption = Literal["auto", "demand", "round_robin"]

_MOST_AUTO_WORKERS = 8
"""How many workers num_workers="auto" means where the number cannot change during an epoch."""


_LARGEST_SEED = (1 << 63) - 1
"""So that torch's generators can take it, an epoch's number added."""


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """The arguments of one DataLoader.

    `from_arguments` checks what is penstock's own; torch's constructor checks torch's. A config never changes: torch
    lets a program set some attributes of a loader between two passes (`loader.num_workers = 4`), and the loader then
    takes a config with that value.
    """

    # ── torch's arguments, as its constructor completes them ────────────────────────────────────────────────
    dataset: Any
    batch_size: int | None = 1
    shuffle: bool | None = None
    sampler: Any = None
    batch_sampler: Any = None
    num_workers: int = 0
    collate_fn: Callable[[Any], Any] | None = None
    pin_memory: PinMemory = False
    drop_last: bool = False
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: BaseContext | str | None = None
    generator: torch.Generator | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory_device: str = ""
    in_order: bool = True
    announced_length: int | None = None
    """What `len(loader)` has returned for an iterable dataset; torch warns when more batches come."""

    # ── penstock's own ──────────────────────────────────────────────────────────────────────────────────────
    worker_type: WorkerType = "process"
    cluster_address: str | None = None
    """Of the Ray cluster, where it was given."""
    worker_bounds: tuple[int, int] | None = None
    """The fewest and the most Ray workers, where the number may change between them."""
    is_auto: bool = False
    """Whether num_workers="auto" was asked for."""
    dispatch: DispatchOption = "auto"
    errors: ErrorPolicy = "raise"
    counts_epochs: bool = True
    """Whether each pass over a mixture or a stream is another epoch; torch's loader repeats the one that it has."""
    max_worker_crashes: int = 3
    ring_bytes: int | None = None
    device: Device | None = None
    device_bytes: int = 512 << 20
    seed: int | None = None
    is_distributed: bool = False
    is_in_group: bool = False
    """Whether the ranks are those of a given process group or mesh."""
    has_replicas: bool = False
    """Whether that group leaves out ranks, which have to get the same batches."""
    group_ranks: tuple[int, ...] = ()
    """Which ranks of the job share the samples out; empty where it is not known yet."""
    uneven: Uneven = "pad"
    snapshot_every_n_steps: int | None = 1
    rank: int = 0
    world_size: int = 1

    @classmethod
    def from_arguments(
        cls,
        *,
        dataset: Any,
        num_workers: int | tuple[int, int] | Literal["auto"],
        worker_type: str,
        pin_memory: Any,
        ring_bytes: int | str | None,
        device: str | torch.device | Device | None,
        device_bytes: int | str,
        seed: Any,
        distributed: Distributed,
        **others: Any,
    ) -> LoaderConfig:
        """Return the config of a DataLoader that is called with these arguments.

        Raises:
            OptionError: an argument of penstock's own is not one of the values that it may have, or two of them
                exclude each other. The message names the values.
        """
        _check_worker_type(worker_type)
        _check_choices(others)
        is_remote = worker_type.startswith("ray://")
        kind: Any = "ray" if is_remote else worker_type
        workers, bounds = _worker_numbers(num_workers, kind)
        if kind == "thread" and isinstance(dataset, IterableDataset) and workers > 1:
            raise OptionError(
                "threads share one dataset object, and an IterableDataset cannot distinguish them to share out its "
                "samples; use worker_type='process', or num_workers=1"
            )
        if workers and isinstance(dataset, Source) and dataset.decodes_on is not None:
            raise OptionError(
                f"the samples of {dataset.where} are decoded on {dataset.decodes_on}, in the training process; use "
                "num_workers=0, or open the source without device="
            )
        rank, world_size = _place(dataset, distributed)
        is_in_group = not isinstance(distributed, bool)
        return cls(
            dataset=dataset,
            num_workers=workers,
            worker_type=kind,
            cluster_address=worker_type if is_remote else None,
            worker_bounds=bounds,
            is_auto=num_workers == "auto",
            pin_memory=_pin_memory(pin_memory),
            ring_bytes=None if ring_bytes is None else to_nbytes("ring_bytes", ring_bytes, least=4096),
            device=None if device is None else device_of(device),
            device_bytes=to_nbytes("device_bytes", device_bytes),
            seed=None if seed is None else _whole_number("seed", seed, least=0, most=_LARGEST_SEED),
            is_distributed=distributed is not False,
            is_in_group=is_in_group,
            has_replicas=is_in_group and world_size < rank_and_world_size()[1],
            rank=rank,
            world_size=world_size,
            group_ranks=ranks_of(distributed),
            **others,
        )

    @functools.cached_property
    def is_iterable(self) -> bool:
        """Whether the dataset yields its samples, and has no indices."""
        return isinstance(self.dataset, IterableDataset)

    @functools.cached_property
    def is_own_stream(self) -> bool:
        """Whether the dataset is one of penstock's streams."""
        return isinstance(self.dataset, Stream)

    @functools.cached_property
    def is_datapipe(self) -> bool:
        """Whether the dataset is one of torch's legacy DataPipes."""
        return isinstance(self.dataset, (IterDataPipe, MapDataPipe))

    @functools.cached_property
    def is_simple(self) -> bool:
        """Whether a pass is what torch's sampler and random state make it, if its dataset keeps no state.

        No workers, no ranks, no seed, and none of penstock's datasets, which may have epochs.
        """
        has_ranks = self.is_distributed or self.world_size > 1 or self.has_replicas
        is_own = isinstance(self.dataset, Source | Stream)
        return self.num_workers == 0 and self.seed is None and not has_ranks and not is_own

    @property
    def is_evened(self) -> bool:
        """Whether ranks agree on how many batches of a stream each hands out; of other data they know."""
        return self.is_own_stream and self.is_distributed and self.world_size > 1 and self.uneven != "join"

    @property
    def keeps_state(self) -> bool:
        """Whether the dataset is map-style and has a state of its own, as torchdata asks for it."""
        return not self.is_iterable and is_stateful(self.dataset)

    @property
    def has_shards(self) -> bool:
        """Whether each worker's dataset is at a position of its own, so that batches go to workers by turns."""
        return self.is_iterable or (self.keeps_state and not self.is_threaded)

    @property
    def is_threaded(self) -> bool:
        """Whether threads make the batches."""
        return self.num_workers > 0 and self.worker_type == "thread"

    @property
    def draws_own_order(self) -> bool:
        """Whether the loader chooses the sampler, because the program has given none."""
        return self.sampler is None and self.batch_sampler is None and not self.is_iterable

    @property
    def auto_collation(self) -> bool:
        """Whether samples are collated into batches (torch's word: not with batch_size=None)."""
        return self.batch_sampler is not None

    @property
    def keeps_order(self) -> bool:
        """Whether batches come in their order: with in_order=False, too, if other ranks have to get the same ones."""
        return self.in_order or self.has_replicas

    @property
    def index_sampler(self) -> Any:
        """What yields the indices of a batch, or of a sample without automatic batching."""
        return self.batch_sampler if self.auto_collation else self.sampler

    @property
    def snapshot_every(self) -> int:
        """After how many batches of a shard its state is asked for; 0 for never."""
        # The state of one of penstock's streams is small and cheap, and a shard can only be split at a state.
        # A map-style dataset's is asked for after every batch: none can be made again without its indices.
        return 1 if self.is_own_stream or self.keeps_state else self.snapshot_every_n_steps or 0

    @property
    def context(self) -> BaseContext:
        """What starts worker processes."""
        context = self.multiprocessing_context
        return context if isinstance(context, BaseContext) else multiprocessing.get_context(context)

    @property
    def start_method(self) -> str:
        """How worker processes are started: fork, forkserver or spawn."""
        return self.context.get_start_method() or ""

    @property
    def shares_memory(self) -> bool:
        """Whether worker processes of this machine write to the slots."""
        return self.num_workers > 0 and self.worker_type == "process"

    @property
    def arrives_on_device(self) -> bool:
        """Whether batches are copied to an accelerator."""
        return self.device is not None and not self.device.is_host

    def own_arguments(self) -> dict[str, Any]:
        """Return penstock's own arguments, of which torch knows nothing, for making another loader like this one."""
        return {
            "worker_type": self.cluster_address or self.worker_type,
            "dispatch": self.dispatch,
            "errors": self.errors,
            "max_worker_crashes": self.max_worker_crashes,
            "ring_bytes": self.ring_bytes,
            "device": self.device,
            "device_bytes": self.device_bytes,
            "seed": self.seed,
        }

    @functools.cached_property
    def worker_spec(self) -> WorkerSpec:
        """What each worker needs to make batches."""
        assert self.collate_fn is not None
        return WorkerSpec(
            dataset=self.dataset,
            collate_fn=self.collate_fn,
            iterable=self.is_iterable,
            auto_collation=self.auto_collation,
            drop_last=self.drop_last,
            init_fn=self.worker_init_fn,
            errors=self.errors,
            # Threads share the global random states, so no sample can have one to itself.
            seeded=self.seed is not None and self.worker_type != "thread",
        )


def auto_workers() -> int:
    """Return the number of workers that num_workers="auto" means where the number must not change."""
    return min(_MOST_AUTO_WORKERS, cores_of_rank() - 1)


def _check_worker_type(worker_type: str) -> None:
    has_address = str(worker_type).startswith("ray://") and worker_type != "ray://"
    if worker_type not in ("process", "thread", "ray") and not has_address:
        raise OptionError(f"worker_type must be 'process', 'thread', 'ray' or 'ray://host:port', not {worker_type!r}")


def _check_choices(given: dict[str, Any]) -> None:
    check_uneven(given["uneven"])
    dispatch, errors = given["dispatch"], given["errors"]
    if dispatch not in ("auto", "demand", "round_robin"):
        raise OptionError(f"dispatch must be 'auto', 'demand' or 'round_robin', not {dispatch!r}")
    is_exception = isinstance(errors, type) and issubclass(errors, BaseException)
    if errors not in ("raise", "skip") and (is_exception or not callable(errors)):
        raise OptionError(f"errors must be 'raise', 'skip' or a callable (exception, index) -> sample, not {errors!r}")
    _whole_number("max_worker_crashes", given["max_worker_crashes"], least=1)
    if given["snapshot_every_n_steps"] is not None:
        _whole_number("snapshot_every_n_steps", given["snapshot_every_n_steps"], least=0)


def _pin_memory(wanted: Any) -> PinMemory:
    """Return the value of pin_memory=; torch takes any number, and None, for true or false."""
    if isinstance(wanted, (int, type(None))):
        return bool(wanted)
    if not hasattr(wanted, "register"):
        raise OptionError(f"pin_memory must be True, False or a penstock.device.Device, not {wanted!r}")
    device: Device = wanted
    return device


def _worker_numbers(
    num_workers: int | tuple[int, int] | Literal["auto"], worker_type: str
) -> tuple[int, tuple[int, int] | None]:
    """Return the number of workers that torch's constructor is given, and the bounds where there are two."""
    if num_workers == "auto":
        if worker_type == "ray":
            raise OptionError(
                "the size of a cluster cannot be guessed: with worker_type='ray' give num_workers=(least, most) "
                "instead of 'auto'"
            )
        return auto_workers(), None
    if num_workers == 0:
        return 0, None  # also 0.0, with which torch's loader works
    if not isinstance(num_workers, tuple) and not hasattr(num_workers, "__index__"):
        raise TypeError(  # as torch's loader, some at its first pass
            f"num_workers must be a number, 'auto', or (least, most) with worker_type='ray', not {num_workers!r}"
        )
    if not isinstance(num_workers, tuple):
        return num_workers, None
    least, most = num_workers
    if worker_type != "ray" or not 0 <= least <= most or most < 1:
        raise OptionError(
            f"num_workers={num_workers!r} must be (least, most) with 0 <= least <= most, and worker_type='ray'; give "
            "one number, or 'auto', for workers on this machine"
        )
    return most, (least, most)


def _place(dataset: Any, distributed: Distributed) -> tuple[int, int]:
    """Return this process's rank and the number of ranks that share out the samples."""
    rank, world_size = place_in(distributed)
    if not distributed and not isinstance(dataset, IterableDataset):
        return 0, 1
    if world_size < rank_and_world_size()[1] and isinstance(dataset, Stream) and dataset.draws_order:
        raise OptionError(
            "this stream is shuffled without a seed, by the random state of each rank, so ranks that are not in the "
            "group of distributed= and need the same samples would get others; use .shuffle(seed=...)"
        )
    return rank, world_size


def _whole_number(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise OptionError(f"{name} must be a whole number, not {value!r}")
    if number < least:
        raise OptionError(f"{name} must be at least {least}, not {number}")
    if most is not None and number > most:
        raise OptionError(f"{name} must be at most {most}, not {number}")
    return number


def check_can_distribute(config: LoaderConfig) -> None:
    """Raise OptionError where distributed= or uneven= cannot be what was asked for."""
    if config.is_evened and not config.group_ranks:
        raise OptionError(
            f"with uneven={config.uneven!r} the {config.world_size} ranks of a stream tell each other how many batches "
            "they have, over the store of torch.distributed; call init_process_group before the loader is made, or "
            "give uneven='join' if no rank waits for another"
        )
    if config.is_own_stream and not config.is_distributed and config.uneven == "drop":
        raise OptionError("uneven='drop' takes distributed=True (or a group): without it, ranks do not know each other")
    if not config.is_distributed or config.draws_own_order:
        return
    if not config.is_iterable:
        raise OptionError(
            "distributed=True draws the order itself, and leaves no place for a sampler or batch_sampler; leave them "
            "out, or have them share out their samples and leave out distributed=True"
        )
    if not isinstance(config.dataset, (Source, Stream)):
        raise OptionError(
            "distributed=True cannot share out the samples of an iterable dataset: let it do so by its rank, or use "
            "penstock.open(...).stream(), which does"
        )
