"""Makes the parts that carry a batch from the dataset to the loop, from a LoaderConfig and a LoaderRuntime.

    worker pool ─▶ Scheduler ─▶ slots of a ring ─▶ Prefetcher, for an accelerator ─▶ LoaderIterator
    no workers: InlineScheduler ─▶ the same

The factory never sees the DataLoader.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.core.host import available_nbytes, pinnable_nbytes
from penstock.core.shared_segment import PrivateSegment, create
from penstock.device import Device
from penstock.loader.checkpoint.epoch_state import EpochState
from penstock.loader.config import LoaderConfig
from penstock.loader.runtime import LoaderRuntime
from penstock.loader.sampling.own_sampler import draws_unnoticed
from penstock.loader.scheduling.batch import Opener
from penstock.loader.scheduling.dispatch import Dispatch, Mode
from penstock.loader.scheduling.inline import InlineScheduler
from penstock.loader.scheduling.purity import why_impure
from penstock.loader.scheduling.scaling_pool import FirstBatch
from penstock.loader.scheduling.scheduler import Scheduler
from penstock.loader.to_device.copy_plan import SlotOpener
from penstock.loader.to_device.pinning import Pinning, pinning_of
from penstock.loader.to_device.prefetch import Prefetcher
from penstock.loader.transport.ring import Ring
from penstock.loader.workers.pool import Pool
from penstock.loader.workers.thread_gate import ThreadGate
from penstock.loader.workers.thread_pool import ThreadPool

_LEAST_RING_NBYTES = 64 << 20

_RAY_POOL = "penstock.cluster.ray_pool"
"""Where the pool for worker_type="ray" is: in a folder above this one, so that it is named here, and not imported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """What one iterator runs. Its parts end in the order of `close`."""

    ring: Ring
    scheduler: Scheduler | InlineScheduler
    batches: Scheduler | InlineScheduler | Prefetcher
    """Where the loop takes its batches: the prefetcher, or the scheduler itself."""
    end_copies: Callable[[], object] | None
    """Ends what the prefetcher has under way; it refers to no scheduler, which may keep an exception, whose frames
    refer to the iterator: a finalizer that held it would keep that alive. Nor does a scheduler's `close`."""
    inline: InlineScheduler | None
    """The scheduler, where batches are made in this process."""
    finish_pinning: Callable[[Any], Any] | None
    """Pins what of a batch does not lie in a pinned slot."""

    @property
    def pool(self) -> Pool | None:
        """The workers; None where batches are made in this process."""
        return self.scheduler.pool

    @property
    def processes(self) -> list[Any]:
        """The worker processes, by worker number."""
        return self.pool.processes if self.pool is not None else []

    @property
    def thread_gate(self) -> ThreadGate | None:
        """Where the worker threads can be stopped; None if the workers are no threads."""
        return self.pool.gate if isinstance(self.pool, ThreadPool) else None

    @property
    def copies_ahead(self) -> bool:
        """Whether copies to a device may be under way."""
        return self.batches is not self.scheduler


def build_pipeline(config: LoaderConfig, runtime: LoaderRuntime, epoch: EpochState) -> Pipeline:
    """Return the running parts for `epoch`: workers are started, and the first batches are under way."""
    pipeline = _kept_pipeline(config, runtime, epoch)
    if pipeline is None:
        pipeline = _new_pipeline(config, runtime, epoch)
    is_plain = pipeline.inline is not None and pipeline.inline.is_plain
    if is_plain and not pipeline.copies_ahead and not config.is_distributed:
        runtime.kept = config, pipeline
    return pipeline


def _kept_pipeline(config: LoaderConfig, runtime: LoaderRuntime, epoch: EpochState) -> Pipeline | None:
    """Return the parts of the pass before, if they do for this one and that has ended, or was left."""
    kept, runtime.kept = runtime.kept, None
    before = runtime.counters.loop() if runtime.counters.loop is not None else None
    if kept is None or kept[0] is not config or not (before is None or before.is_over):
        return None
    pipeline: Pipeline = kept[1]
    pipeline.batches.begin(epoch)
    return pipeline


def _new_pipeline(config: LoaderConfig, runtime: LoaderRuntime, epoch: EpochState) -> Pipeline:
    pinning = pinning_of(config.pin_memory, config.pin_memory_device, config.device)
    runtime.counters.pinning = pinning.reason
    ring = _ring(config, runtime, pinning)
    try:
        inline = _inline_scheduler(config, runtime, epoch, ring, pinning) if config.num_workers == 0 else None
        scheduler = inline or _started_scheduler(config, runtime, epoch, ring, pinning)
    except BaseException:
        ring.close()
        raise
    batches: Scheduler | InlineScheduler | Prefetcher = scheduler
    end_copies = None
    if config.device is not None and config.arrives_on_device:
        batches = Prefetcher(
            scheduler,
            config.device,
            budget_nbytes=config.device_bytes,
            counters=runtime.counters,
            keep=functools.partial(_keep_on_host, ring, config.device),
            consumed_of=lambda: scheduler.consumed,
        )
        end_copies = batches.in_flight.close
    return Pipeline(
        ring=ring,
        scheduler=scheduler,
        batches=batches,
        end_copies=end_copies,
        inline=inline,
        finish_pinning=pinning.finish,
    )


def _inline_scheduler(
    config: LoaderConfig, runtime: LoaderRuntime, epoch: EpochState, ring: Ring, pinning: Pinning
) -> InlineScheduler:
    """Return a scheduler that loads in this process."""
    if config.timeout != 0:
        raise AssertionError("num_workers=0 loads in the training process, which cannot time out; use timeout=0")
    scheduler = InlineScheduler(config.worker_spec, ring, runtime.counters, pins=pinning.is_needed)
    scheduler.begin(epoch)
    return scheduler


def _started_scheduler(
    config: LoaderConfig, runtime: LoaderRuntime, epoch: EpochState, ring: Ring, pinning: Pinning
) -> Scheduler:
    mode, reason = _dispatch_mode(config)
    is_ahead = config.device is not None and config.arrives_on_device
    workers = config.num_workers
    if runtime.auto_workers is not None:
        workers = runtime.auto_workers.choose(is_fixed=mode == "round_robin")
    is_settled = not _waits_for_first_batch(config, runtime, mode)
    dispatch = _dispatch(config, runtime, mode, reason, workers if is_settled else 1)
    pool = _pool(config, runtime, mode, workers, epoch.base_seed, pinning, is_settled=is_settled)
    scheduler = Scheduler(
        worker_spec=config.worker_spec,
        pool=pool,
        ring=ring,
        dispatch=dispatch,
        counters=runtime.counters,
        in_order=config.keeps_order,
        timeout_s=config.timeout,
        max_worker_crashes=config.max_worker_crashes,
        spare_slots=1 + pinning.slots_in_copies,
        snapshot_every=config.snapshot_every,
        auto_workers=runtime.auto_workers,
        first_batch=None if is_settled else _first_batch(config, runtime, pool),
        opener=(SlotOpener if is_ahead else Opener)(ring, runtime.counters),
    )
    scheduler.start(epoch.shards)
    try:
        scheduler.begin(epoch)
    except BaseException:  # the sampler's
        scheduler.close()
        raise
    return scheduler


def _waits_for_first_batch(config: LoaderConfig, runtime: LoaderRuntime, mode: Mode) -> bool:
    """Return whether the first batch decides how many workers this epoch has.

    Its indices are then drawn before the others' workers are forked: nobody must be able to tell.
    """
    return (
        runtime.auto_workers is not None
        and runtime.auto_workers.is_guess
        and mode == "round_robin"
        and config.worker_type == "process"
        and config.keeps_order
        and draws_unnoticed(config.index_sampler)
    )


def _first_batch(config: LoaderConfig, runtime: LoaderRuntime, pool: Any) -> FirstBatch:
    assert runtime.auto_workers is not None
    return FirstBatch(
        pool, runtime.auto_workers, batches=len(config.index_sampler), prefetch_factor=config.prefetch_factor or 2
    )


# ── workers ─────────────────────────────────────────────────────────────────────────────────────────────────


def _pool(
    config: LoaderConfig,
    runtime: LoaderRuntime,
    mode: Mode,
    workers: int,
    base_seed: int,
    pinning: Pinning,
    *,
    is_settled: bool,
) -> Pool:
    """Return workers, not started yet; one, if it is not settled how many there are, and `workers` is a guess."""
    worker_spec = config.worker_spec
    if config.worker_type == "thread":
        return ThreadPool(worker_spec, workers, base_seed=base_seed, pins=pinning.is_needed)
    announced = workers if mode == "round_robin" else config.num_workers
    if config.worker_type == "ray":
        cluster: Any = importlib.import_module(_RAY_POOL)
        connect = functools.partial(cluster.Cluster, config.cluster_address)
        runtime.resources.hold_cluster(connect)
        ray_pool: Pool = cluster.RayPool(
            worker_spec, workers, cluster=connect(), reported_workers=announced, base_seed=base_seed
        )
        return ray_pool
    most = workers if runtime.auto_workers is None else runtime.auto_workers.most_waiting
    from penstock.loader.workers.process_pool import ProcessPool  # imports what only some systems have

    return ProcessPool(
        worker_spec,
        workers if is_settled else 1,
        most=most,
        reported_workers=announced,
        context=config.context,
        is_default=config.multiprocessing_context is None,
        base_seed=base_seed,
        is_settled=is_settled,
        is_watched=runtime.auto_workers is not None and (mode == "round_robin" or bool(why_impure(worker_spec))),
    )


def _dispatch(config: LoaderConfig, runtime: LoaderRuntime, mode: Mode, reason: str, workers: int) -> Dispatch:
    """Return which worker gets which batch. Each iterator has its own: several of one loader may run."""
    if config.prefetch_factor is None or config.prefetch_factor <= 0:
        raise AssertionError(
            f"prefetch_factor must be greater than 0 where there are workers, not {config.prefetch_factor}; "
            "leave it out for 2 batches per worker"
        )
    runtime.dispatch = Dispatch(
        mode,
        reason,
        workers=max(1, workers),
        prefetch_factor=config.prefetch_factor,
        # Workers that persist remember what they have made, and torch's would have made less.
        may_run_ahead=not config.persistent_workers and draws_unnoticed(config.index_sampler),
        previous=runtime.dispatch,
    )
    return runtime.dispatch


def _dispatch_mode(config: LoaderConfig) -> tuple[Mode, str]:
    """Return how work is given out, and why: on demand only by the user's word, or with a proof."""
    if config.is_iterable:
        return "stream", "an iterable dataset has its own samples in each worker"
    if config.has_shards:
        return "stream", "the dataset keeps a state in each worker"
    if config.worker_type == "thread":
        return "demand", "threads share one dataset and one random state"
    if config.dispatch != "auto":
        return config.dispatch, "asked for"
    if config.worker_type == "process" and config.worker_spec.prefetch is not None:
        return "round_robin", "as torch assigns, so that each worker knows which remote files its next batches read"
    if config.seed is not None and config.worker_init_fn is None:
        return "demand", "asked for: with seed=, samples depend on the seed, the epoch and their index only"
    if doubt := why_impure(config.worker_spec):
        return "round_robin", f"as torch assigns, because {doubt}"
    return "demand", "no sample can tell which worker makes it: dataset and collate_fn are known to keep no state"


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────


def _ring(config: LoaderConfig, runtime: LoaderRuntime, pinning: Pinning) -> Ring:
    """Return a ring that no other iterator of this loader uses."""
    shared = config.shares_memory
    runtime.ring = runtime.resources.ring_cache.take(shared=shared)
    if runtime.ring is not None:
        return runtime.ring
    runtime.ring = Ring(
        create if shared else PrivateSegment,
        config.ring_bytes or max(_LEAST_RING_NBYTES, available_nbytes() // 4),
        pin=pinning.pin,
        pin_budget_nbytes=pinnable_nbytes() if pinning.pin is not None else None,
        fence=pinning.fence,
    )
    return runtime.ring


def _keep_on_host(ring: Ring, device: Device, leaf: Any) -> Any:
    """Return a part of a batch that stays on the host, so that the user may copy it to a device and drop it."""
    if not device.can_register:
        return leaf
    if not device.has_fence:
        return copy.deepcopy(leaf)
    ring.fence_from_now(device.fence)
    return leaf
