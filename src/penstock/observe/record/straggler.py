"""Which rank's loader the other ranks waited for.

Ranks that train one model go in step: a rank that waits for its data makes all others wait in their next collective.
So that rank's loader waits longer than theirs, and their steps, in which collectives are, take longer by about as much.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.observe.record.rank_record import RankRecord

_IN_STEP = 1.1
"""Ranks with more batches than others by this factor do not go in step."""

_EXPLAINED = 0.5
"""Of a loader's longer waiting, what must be found in the other ranks' steps."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """Ranks that the others waited for."""

    ranks: tuple[int, ...]
    stall_fraction: float
    """Of the slowest one's time, what it waited for data."""

    others_fraction: float
    """The same of the others, as a median."""

    longer_s: float
    """How much longer than the median rank's the slowest one's wait for a batch was."""

    lost_fraction: float
    """Of the time of all, what they would save without that."""


def find_straggler(ranks: Sequence[RankRecord], least_fraction: float) -> Straggler | None:
    """Return the ranks whose loaders the others waited for; None if there are none, or counters do not show it.

    Args:
        ranks: of one run.
        least_fraction: how much of the loops' time must have been lost.

    >>> slow = RankRecord(rank=1, batches=100, loop_s=50.0, loading_s=30.0)
    >>> find_straggler([RankRecord(rank=0, batches=100, loop_s=50.0, loading_s=1.0), slow], 0.1).ranks
    (1,)
    """
    used = [rank for rank in ranks if rank.batches and rank.loop_s]
    if len(used) < 2 or max(rank.batches for rank in used) > _IN_STEP * min(rank.batches for rank in used):
        return None
    usual_s = statistics.median_low(map(_wait_s, used))
    slowest = max(used, key=_wait_s)
    longer_s = _wait_s(slowest) - usual_s
    slow = [rank for rank in used if _wait_s(rank) > usual_s + longer_s / 2]
    others = [rank for rank in used if rank not in slow]
    lost_fraction = longer_s * slowest.batches / slowest.loop_s
    if not others or len(slow) > len(used) / 2 or lost_fraction < least_fraction:
        return None
    if statistics.median(map(_step_s, others)) - _step_s(slowest) < _EXPLAINED * longer_s:
        return None
    return Straggler(
        ranks=tuple(rank.rank for rank in slow),
        stall_fraction=slowest.stall_fraction,
        others_fraction=statistics.median(rank.stall_fraction for rank in others),
        longer_s=longer_s,
        lost_fraction=lost_fraction,
    )


def _wait_s(rank: RankRecord) -> float:
    return rank.loading_s / rank.batches


def _step_s(rank: RankRecord) -> float:
    return (rank.loop_s - rank.loading_s) / rank.batches
