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

from penstock.data.convert.numbered_records import RecordCounts
from penstock.data.convert.source_contents import SourceContents, schema_from_json
from penstock.data.convert.target import Target
from penstock.data.schema import Schema

SEGMENT_NBYTES = 64 << 20
_MIN_SEGMENT_NBYTES = 1 << 20
_MAX_SEGMENTS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionPlan:
    """What is written, and in which segments."""

    schema: Schema
    counts: RecordCounts
    truncated_shards: int
    boundaries: tuple[int, ...]
    """Segment i has the records from boundaries[i] to boundaries[i + 1]."""
    groups: tuple[int, ...] | None
    """How many segments each file is made of; None if their size decides."""

    @property
    def segments(self) -> int:
        """The number of segments."""
        return len(self.boundaries) - 1

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> ConversionPlan:
        """Return the plan of a journal's entry, which `asdict` made."""
        return cls(
            schema=schema_from_json(entry["schema"]),
            counts=RecordCounts(tuple(entry["counts"]["per_shard"])),
            truncated_shards=entry["truncated_shards"],
            boundaries=tuple(entry["boundaries"]),
            groups=None if entry["groups"] is None else tuple(entry["groups"]),
        )


def make_plan(
    contents: SourceContents, target: Target, chunk_starts: np.ndarray | None, workers: int, *, joins: bool
) -> ConversionPlan:
    """Return how a source's records are cut, at its chunks where it has some; `joins` if the format joins files."""
    total = contents.counts.total
    if target.shards is None and joins:
        max_nbytes = min(SEGMENT_NBYTES, max(1, (target.shard_nbytes or 1) // 4))
        count = _segment_count(contents, workers, max_nbytes)
        return _plan(contents, _boundaries(0, total, count, chunk_starts), None)
    shards = target.shards
    if shards is None:
        shards = max(1, min(total, -(-contents.nbytes // (target.shard_nbytes or 1)), _MAX_SEGMENTS))
    ends = [total * number // shards for number in range(shards + 1)]
    if not joins:
        return _plan(contents, ends, (1,) * shards)
    boundaries, groups = [0], []
    for first, stop in pairwise(ends):
        count = -(-_segment_count(contents, workers, SEGMENT_NBYTES) // shards)
        inner = _boundaries(first, stop, count, chunk_starts)
        boundaries += inner[1:]
        groups.append(len(inner) - 1)
    return _plan(contents, boundaries, tuple(groups))


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


def _plan(contents: SourceContents, boundaries: Sequence[int], groups: tuple[int, ...] | None) -> ConversionPlan:
    return ConversionPlan(
        schema=contents.schema,
        counts=contents.counts,
        truncated_shards=contents.truncated_shards,
        boundaries=tuple(boundaries),
        groups=groups,
    )


def _segment_count(contents: SourceContents, workers: int, max_nbytes: int) -> int:
    """Return how many segments to make of all records: enough for their size, and some for each worker."""
    by_size = -(-contents.nbytes // max_nbytes)
    for_workers = min(4 * max(1, workers), -(-contents.nbytes // min(_MIN_SEGMENT_NBYTES, max_nbytes)))
    return max(1, min(contents.counts.total, max(by_size, for_workers), _MAX_SEGMENTS))


def _boundaries(first: int, stop: int, count: int, chunk_starts: np.ndarray | None) -> list[int]:
    """Return where segments begin, and the end; at beginnings of chunks, where there are enough."""
    inner = np.array([first + (stop - first) * number // count for number in range(1, count)], np.int64)
    if chunk_starts is not None and len(chunk_starts) > 2 and len(inner):
        inner = chunk_starts[np.clip(np.searchsorted(chunk_starts, inner), 0, len(chunk_starts) - 1)]
    kept = {int(boundary) for boundary in inner if first < boundary < stop}
    return [first, *sorted(kept), stop]
