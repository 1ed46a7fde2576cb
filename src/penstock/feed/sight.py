"""What a loop under way looks like just now, from another thread than the one that iterates. It only reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from penstock.feed.counters import Counters
from penstock.feed.epoch import EpochRunner
from penstock.feed.transport.ring import Ring
from penstock.feed.workers.process import ProcessPool
from penstock.feed.workers.thread import ThreadPool


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSight:
    """One look at one loop."""

    ready: int = 0
    """Batches that are finished and have not been handed out, those included that nobody has taken in yet."""

    held: int = 0
    """Batches that the program still looks at."""

    slots_nbytes: int = 0
    """Host memory of the loop's slots."""

    workers: int = 0
    """Workers of the loop."""

    working: int = 0
    """Those that are making something."""

    starting: int = 0
    """Those that have not begun their first piece of work."""


def look(counters: Counters) -> LoopSight | None:
    """Return how the latest loop of the loader with these counters looks.

    Returns None when it changed too much during the look: nothing is locked for it.
    """
    iterator = counters.loop() if counters.loop is not None else None
    if iterator is None or iterator._over:
        return LoopSight()
    runner: Any = iterator._host
    try:
        held, slots_nbytes = _slots(iterator._ring)
        if not isinstance(runner, EpochRunner):
            return LoopSight(held=held, slots_nbytes=slots_nbytes)
        finished, working, starting = _pool(runner.pool)
        under_way = list(runner._batches.values())
        ready = sum(batch.left <= finished[batch] and not batch.void for batch in under_way) + len(runner._ready)
        return LoopSight(
            ready=ready,
            held=held,
            slots_nbytes=slots_nbytes,
            workers=runner.pool.size,
            working=working,
            starting=starting,
        )
    except (RuntimeError, ValueError, IndexError):  # a dictionary grew meanwhile, or the control page was closed
        return None


def _slots(ring: Ring) -> tuple[int, int]:
    counts = ring.counts()
    return counts.held, counts.nbytes


def _pool(pool: Any) -> tuple[Counter[Any], int, int]:
    """Return how many finished pieces wait to be taken in, by batch, how many workers work, how many are starting."""
    if isinstance(pool, ProcessPool):
        return _processes(pool)
    if isinstance(pool, ThreadPool):
        return _threads(pool)
    return Counter(), 0, 0


def _processes(pool: ProcessPool) -> tuple[Counter[Any], int, int]:
    control = pool._control
    idle = [control.is_idle(worker) for worker in range(pool.size)]
    claims = [control.claimed(worker) for worker in range(pool.size)]
    pieces = list(pool._outstanding.values())
    busy = {claim for claim, is_idle in zip(claims, idle, strict=True) if claim is not None and not is_idle}
    newest = max((claim for claim in claims if claim is not None), default=-1)
    # The shared queue is taken from in order; a worker's inbox too.
    finished = Counter(
        piece.into
        for piece in pieces
        if not piece.cancelled
        and piece.seq not in busy
        and piece.seq <= (newest if piece.worker is None else _claim(claims[piece.worker]))
    )
    return finished, len(busy), claims.count(None)


def _claim(claimed: int | None) -> int:
    return -1 if claimed is None else claimed


def _threads(pool: ThreadPool) -> tuple[Counter[Any], int, int]:
    waiting, done = pool._work.qsize(), pool._done.qsize()
    pieces = sorted((piece for piece in list(pool._outstanding.values()) if not piece.cancelled), key=_seq)
    # Which are done is not known; they are taken to be the oldest, as nearly all are.
    finished = Counter(piece.into for piece in pieces[:done])
    return finished, max(0, min(pool.size, len(pieces) - waiting - done)), 0


def _seq(piece: Any) -> int:
    return int(piece.seq)
