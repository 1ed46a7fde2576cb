"""How fast a source is read here, in one thread: in order, and at random where samples have numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.core.errors import RecordError
from penstock.feed.sources.base import Source
from penstock.feed.sources.measure import nbytes_of
from penstock.feed.sources.sample import Sample
from penstock.feed.sources.stream import Stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What was read in a while. What the page cache held came from there, and a disk may be slower."""

    order: Literal["sequential", "random"]
    samples: int
    nbytes: int
    """Of the samples as they come out: decoded, unpacked."""
    seconds: float
    broken: int
    """Records that could not be read."""

    @property
    def samples_per_s(self) -> float:
        """Samples in a second."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def nbytes_per_s(self) -> float:
        """Bytes in a second."""
        return self.nbytes / self.seconds if self.seconds else 0.0


def measured(source: Source | Stream, seconds: float) -> list[Speed]:
    """Read for `seconds` in order, and as long at random; each ends early when all has been read once."""
    if isinstance(source, Stream):
        return [_timed("sequential", in_order(source), seconds)]
    order = np.random.default_rng(0).permutation(len(source))
    return [
        _timed("sequential", in_order(source), seconds),
        _timed("random", (_read(source, int(index)) for index in order), seconds),
    ]


def in_order(source: Source | Stream) -> Iterator[Sample | RecordError]:
    """Yield all samples, and a RecordError in the place of one that is broken."""
    if isinstance(source, Source):
        yield from (_read(source, index) for index in range(len(source)))
        return
    for shard in source.shards:
        try:
            yield from source.read(shard, 0, 1)
        except RecordError as error:
            yield error


def _read(source: Source, index: int) -> Sample | RecordError:
    try:
        sample: Sample = source.read(index)
    except RecordError as error:
        return error
    return sample


def _timed(order: Literal["sequential", "random"], records: Iterator[Sample | RecordError], seconds: float) -> Speed:
    samples = nbytes = broken = 0
    began = now = time.perf_counter()
    for record in records:
        now = time.perf_counter()
        if isinstance(record, RecordError):
            broken += 1
        else:
            samples += 1
            nbytes += nbytes_of(record)
        if now - began > seconds:
            break
    return Speed(order=order, samples=samples, nbytes=nbytes, seconds=now - began, broken=broken)
