"""What a running loop looks like at one moment, for a thread other than the one that iterates. It only reads."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.loader.counters import Counters


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSnapshot:
    """One loop at one moment. Without workers, only the slots are counted."""

    ready: int = 0
    """Batches that are finished and have not been handed out, including those not yet collected from the workers."""

    held: int = 0
    """Batches that the program still has views of."""

    slots_nbytes: int = 0
    """Host memory of the loop's slots."""

    workers: int = 0
    """Workers of the loop."""

    working: int = 0
    """Those that make something."""

    starting: int = 0
    """Those that have not begun their first task."""


def take_snapshot(counters: Counters) -> LoopSnapshot | None:
    """Return what the latest loop of the loader with these counters looks like.

    Returns None if the loop changed too much meanwhile, because nothing is locked for a snapshot.
    """
    iterator = counters.loop() if counters.loop is not None else None
    if iterator is None or iterator.is_over:
        return LoopSnapshot()
    pipeline = iterator.pipeline
    try:
        slots = pipeline.ring.counts()
        if pipeline.pool is None:
            return LoopSnapshot(held=slots.held, slots_nbytes=slots.nbytes)
        workers = pipeline.pool.snapshot()
        return LoopSnapshot(
            ready=pipeline.scheduler.count_ready(workers.finished),
            held=slots.held,
            slots_nbytes=slots.nbytes,
            workers=pipeline.pool.size,
            working=workers.working,
            starting=workers.starting,
        )
    except (RuntimeError, ValueError, IndexError):  # a dictionary grew meanwhile, or the control page was closed
        return None
