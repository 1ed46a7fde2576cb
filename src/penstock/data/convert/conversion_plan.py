"""The plan of a conversion: how the records of a source are cut into segments, and segments grouped to files.

A segment has about 64 MiB of samples, which is the most work that a kill can cost a worker. The chunks or row groups
of a source stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.data.convert.source_contents import SourceContents
from penstock.data.convert.target import Target
from penstock.data.schema import Schema

SEGMENT_NBYTES = 64 << 20
_MIN_SEGMENT_NBYTES = 1 << 20
_MAX_SEGMENTS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionPlan:
    """Which segments are written, and what files they are joined to."""

    contents: SourceContents
    boundaries: tuple[int, ...]
    """Segment i has the records from boundaries[i] to boundaries[i + 1]."""
    groups: tuple[int, ...] | None
    """How many segments each file is made of; None if their size decides."""

    @property
    def schema(self) -> Schema:
        """The schema of all samples."""
        assert self.contents.schema is not None
        return self.contents.schema

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> ConversionPlan:
        """Return the plan that `asdict` made `entry` of."""
        return cls(
            contents=SourceContents.from_json(entry["contents"]),
            boundaries=tuple(entry["boundaries"]),
            groups=None if entry["groups"] is None else tuple(entry["groups"]),
        )


def make_plan(
    contents: SourceContents, target: Target, chunk_starts: np.ndarray | None, workers: int, *, joins: bool
) -> ConversionPlan:
    """Return how a source's records are cut, at its chunks where it has some; `joins` if the format joins files."""
    total, shards, max_nbytes = sum(contents.counts), target.shards, SEGMENT_NBYTES
    if shards is None and joins:
        shards, max_nbytes = 1, min(SEGMENT_NBYTES, max(1, (target.shard_nbytes or 1) // 4))
    elif shards is None:
        shards = max(1, min(total, -(-contents.nbytes // (target.shard_nbytes or 1)), _MAX_SEGMENTS))
    count = -(-_segment_count(contents, workers, max_nbytes) // shards) if joins else 1
    boundaries, groups = [0], []
    for first, stop in pairwise(total * number // shards for number in range(shards + 1)):
        inner = _boundaries(first, stop, count, chunk_starts)
        boundaries += inner[1:]
        groups.append(len(inner) - 1)
    by_size = target.shards is None and joins
    return ConversionPlan(contents=contents, boundaries=tuple(boundaries), groups=None if by_size else tuple(groups))


def group_segments(plan: ConversionPlan, target: Target, nbytes: Sequence[int]) -> list[range]:
    """Return the segments that each file is made of, given the bytes of each segment."""
    if plan.groups is not None:
        ends = [0, *np.cumsum(plan.groups).tolist()]
        return [range(first, stop) for first, stop in pairwise(ends)]
    groups, first, size = [], 0, 0
    for number, more in enumerate(nbytes):
        if number > first and size + more > (target.shard_nbytes or 0):
            groups.append(range(first, number))
            first, size = number, 0
        size += more
    return [*groups, range(first, len(nbytes))]


def _segment_count(contents: SourceContents, workers: int, max_nbytes: int) -> int:
    """Return how many segments to make of all records: enough for their size, and some for each worker."""
    by_size = -(-contents.nbytes // max_nbytes)
    for_workers = min(4 * max(1, workers), -(-contents.nbytes // min(_MIN_SEGMENT_NBYTES, max_nbytes)))
    return max(1, min(sum(contents.counts), max(by_size, for_workers), _MAX_SEGMENTS))


def _boundaries(first: int, stop: int, count: int, chunk_starts: np.ndarray | None) -> list[int]:
    """Return where segments begin, and the end; at beginnings of chunks, where there are enough."""
    inner = np.array([first + (stop - first) * number // count for number in range(1, count)], np.int64)
    if chunk_starts is not None and len(chunk_starts) > 2 and len(inner):
        inner = chunk_starts[np.clip(np.searchsorted(chunk_starts, inner), 0, len(chunk_starts) - 1)]
    kept = {int(boundary) for boundary in inner if first < boundary < stop}
    return [first, *sorted(kept), stop]
