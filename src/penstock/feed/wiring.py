"""Wiring: the parts on the road of a batch, made as a DataLoader's arguments say."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import weakref
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any

from torch.utils.data.dataloader import _DatasetKind

from penstock.core.host import available_nbytes, pinnable_nbytes
from penstock.core.numa import cores_near, prefer_memory
from penstock.distributed.alarm import Alarm
from penstock.feed.dispatch import Dispatch, Mode
from penstock.feed.pinning import Pinning
from penstock.feed.prefetch import Flight
from penstock.feed.transport.ring import Ring
from penstock.feed.transport.slab import PrivateSlab, Slab, create, memfd_works
from penstock.feed.workers.base import Pool
from penstock.feed.workers.maker import Job
from penstock.feed.workers.process import ProcessPool
from penstock.feed.workers.ray import RayPool
from penstock.feed.workers.ray_cluster import Cluster
from penstock.feed.workers.thread import ThreadPool

if TYPE_CHECKING:
    from penstock.feed.loader import DataLoader


def job_of(loader: DataLoader[Any]) -> Job:
    """Return what each of the loader's workers does."""
    assert loader.collate_fn is not None
    return Job(
        dataset=loader.dataset,
        collate_fn=loader.collate_fn,
        iterable=loader._dataset_kind == _DatasetKind.Iterable,
        auto_collation=loader._auto_collation,
        drop_last=loader.drop_last,
        errors=loader._errors,
        keep_batch_size=loader._keep_batch_size,
        seeded=loader.seed is not None and loader._body != "thread",
    )


def _context(loader: DataLoader[Any]) -> BaseContext:
    return loader.multiprocessing_context or multiprocessing.get_context()


def start_method(loader: DataLoader[Any]) -> str:
    """Return how worker processes are started."""
    return _context(loader).get_start_method() or ""


def pool_of(loader: DataLoader[Any], dispatch: Dispatch, base_seed: int, numa_node: int | None) -> Pool:
    """Return workers, not started yet."""
    job = job_of(loader)
    workers, most = loader.num_workers, loader.num_workers
    if loader._regulator is not None:
        regulator = loader._regulator
        workers, most = regulator.choose() if dispatch.mode == "round_robin" else regulator.workers, regulator.most
        dispatch.size_up(workers)
    if loader._body == "thread":
        return ThreadPool(job, workers)
    told = workers if dispatch.mode == "round_robin" else loader.num_workers
    if loader._body == "ray":
        if loader._cluster is None:  # a share of the loader's own, so that the connection outlives an epoch's workers
            loader._cluster = Cluster(loader._cluster_address)
            weakref.finalize(loader, loader._cluster.leave)
        return RayPool(
            job,
            workers,
            cluster=Cluster(loader._cluster_address),
            told=told,
            base_seed=base_seed,
            init_fn=loader.worker_init_fn,
            watch=_mode(loader)[0] == "probing",
        )
    return ProcessPool(
        job,
        workers,
        most=most,
        told=told,
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
    if loader.worker_init_fn is None and loader.seed is not None:
        return "demand", "every sample has a seed of its own"
    if loader.worker_init_fn is not None:
        return "round_robin", "as torch assigns, because worker_init_fn may make workers differ"
    return "probing", "the first batch will show"


def dispatch_of(loader: DataLoader[Any]) -> Dispatch:
    """Return who gets which batch: what earlier epochs have learned, or the beginnings of it."""
    if loader._learned is None:
        mode, reason = _mode(loader)
        splittable = job_of(loader).rows_can_be_split and loader._body != "ray"  # no machine has all the rows' slot
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


def ring_of(loader: DataLoader[Any], pinning: Pinning) -> Ring:
    """Return a ring that no other iterator of this loader uses."""
    loader._ring = loader._shelf.take()
    if loader._ring is not None:
        return loader._ring
    in_process = loader.num_workers == 0 or loader._body in ("thread", "ray")
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


def close_all(flight: Flight | None, close: Callable[[], Any], shelf: Shelf, ring: Ring, alarm: Alarm | None) -> None:
    """End what an iterator has under way; the ring goes to the next one."""
    if flight is not None:
        flight.close()  # its copies read the ring's slots
    if alarm is not None:
        alarm.close()
    close()
    shelf.put(ring)


class Shelf:
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
