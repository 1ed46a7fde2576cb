"""LoaderRuntime: what of a DataLoader changes while it runs. One object owns it, and closes what must be closed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.core.stats import LoaderStatistics, RingCounts
from penstock.distributed.step_counts import StepCounts
from penstock.distributed.stop_agreement import StopRequests
from penstock.loader.checkpoint.epoch_state import EpochState
from penstock.loader.checkpoint.resume import Resume
from penstock.loader.config import LoaderConfig
from penstock.loader.counters import Counters
from penstock.loader.sampling.orders import Order
from penstock.loader.scheduling.auto_workers import AutoWorkers
from penstock.loader.scheduling.dispatch import Dispatch
from penstock.loader.transport.ring import Ring


class RingCache:
    """Keeps the ring of the last epoch for the next one, for as long as its loader lives.

    Two iterators of one loader may run at the same time, and each needs a ring for itself: the cache holds at most one
    that is not in use.
    """

    def __init__(self) -> None:
        self._ring: Ring | None = None
        self._is_shared = False
        self._closed = False

    def take(self, *, shared: bool) -> Ring | None:
        """Return the cached ring and forget it; None if there is none of this kind.

        Args:
            shared: whether other processes write to its slots. A program may set `num_workers` between two passes.
        """
        ring, self._ring = self._ring, None
        if ring is not None and self._is_shared != shared:
            ring.close()
            ring = None
        return ring

    def put(self, ring: Ring, *, shared: bool) -> None:
        """Cache `ring`; close it if there is one already, or if the loader has gone."""
        if self._closed or self._ring is not None:
            ring.close()
        else:
            ring.reclaim()
            self._ring, self._is_shared = ring, shared

    def close(self) -> None:
        """Close the cached ring, and every ring that is put here from now on."""
        self._closed = True
        if self._ring is not None:
            self._ring.close()
            self._ring = None


class LoaderResources:
    """What outlives the workers of one epoch, and is closed when the loader is gone.

    It refers to neither the loader nor its dataset, so that a finalizer of the loader may hold it.
    """

    def __init__(self) -> None:
        self.ring_cache = RingCache()
        self._cluster: Any = None

    def hold_cluster(self, connect: Callable[[], Any]) -> None:
        """Hold a share in the connection to a cluster, so that it does not end with an epoch's workers."""
        if self._cluster is None:
            self._cluster = connect()

    def close(self) -> None:
        """Close the ring that is not in use, and leave the cluster."""
        self.ring_cache.close()
        if self._cluster is not None:
            self._cluster.leave()


@dataclass(kw_only=True)
class LoaderRuntime:
    """The mutable half of a DataLoader; `LoaderConfig` is the other.

    Written by the thread that iterates, and by `load_state_dict` and `set_epoch` between two passes.
    """

    config: LoaderConfig
    """The arguments as they are now: another object after the program has set one of torch's attributes."""
    order: Order
    """How the sampler draws, and how to draw the same indices again."""
    drawn: Any = None
    """The sampler that `order` is of, if it still is."""
    counters: Counters = field(default_factory=Counters)
    ring: Ring | None = None
    """Of the iterator that was made last."""
    kept: tuple[LoaderConfig, Any] | None = None
    """The config and the `Pipeline` of the last loop that made its batches itself: the next pass may take it over."""
    resources: LoaderResources = field(default_factory=LoaderResources)
    dispatch: Dispatch | None = None
    """Which worker gets which batch, of the iterator that was made last; it has learned what batches cost."""
    auto_workers: AutoWorkers | None = None
    """What chooses the number of workers, where it may change."""
    fingerprint: dict[str, str] | None = None
    """Of dataset and sampler before the first pass, which may change them."""
    owner: dict[str, Any] | None = None
    """What states say of dataset and sampler; None until one is taken in this pass."""
    next_epoch: int = 0
    is_epoch_set: bool = False
    """Whether the program has set `next_epoch` since the last pass began."""
    epoch: EpochState | None = None
    """The pass that was begun last."""
    resume: Resume | None = None
    """Where the next pass begins, after `load_state_dict`."""
    loaded: dict[str, Any] | None = None
    """The state that was loaded, until a pass begins: `state_dict` returns it unchanged."""
    step_counts: StepCounts | None = None
    """Of the ranks that share a stream out, from the first time that they agree."""
    stop_requests: StopRequests | None = None
    """The signals that are watched, from the first `stop_requested`."""

    def carried(self) -> dict[str, Any]:
        """Return the fields that a copy of the loader takes along, in this process or another.

        Rings, counters, connections and the pass under way stay; where to resume and what was measured travel.
        """
        names = ("config", "auto_workers", "fingerprint", "next_epoch", "is_epoch_set", "resume", "loaded")
        return {name: getattr(self, name) for name in names}

    def statistics(self, *, digests: bool = True) -> LoaderStatistics:
        """Return what has been counted so far; without `digests`, which hash indices, it takes a third of the time."""
        config = self.config
        has_workers = config.num_workers > 0
        return self.counters.snapshot(
            ring=self.ring.counts() if self.ring is not None else RingCounts(),
            worker_type=config.worker_type if has_workers else "inline",
            start_method=config.start_method if has_workers and config.worker_type == "process" else "",
            workers=config.num_workers,
            digests=digests,
        )
