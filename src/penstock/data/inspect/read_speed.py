"""Measures how fast one thread reads a source: in order, and at random where samples have numbers."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.core.errors import RecordError
from penstock.data.sample_nbytes import nbytes_of
from penstock.data.schema import Sample
from penstock.data.source import Source
from penstock.data.stream import Stream


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSpeed:
    """What was read, and in which time. Reads from the page cache are included; a disk may be slower."""

    order: Literal["sequential", "random"]
    samples: int
    nbytes: int
    """Of the samples: decoded, decompressed."""
    duration_s: float
    errors: int
    """Records that could not be read."""

    @property
    def samples_per_s(self) -> float:
        """Samples in a second."""
        return self.samples / self.duration_s if self.duration_s else 0.0

    @property
    def nbytes_per_s(self) -> float:
        """Bytes in a second."""
        return self.nbytes / self.duration_s if self.duration_s else 0.0


def measure_speeds(source: Source | Stream, seconds: float) -> list[ReadSpeed]:
    """Read for `seconds` in order, and as long at random; each ends early when all has been read once."""
    if isinstance(source, Stream):
        return [_time_reads("sequential", iter_in_order(source), seconds)]
    order = np.random.default_rng(0).permutation(len(source))
    return [
        _time_reads("sequential", iter_in_order(source), seconds),
        _time_reads("random", (read_or_error(source, int(index)) for index in order), seconds),
    ]


def iter_in_order(source: Source | Stream) -> Generator[Sample | RecordError, None, None]:
    """Yield all samples, and a RecordError in the place of one that is broken."""
    if isinstance(source, Source):
        yield from (read_or_error(source, index) for index in range(len(source)))
        return
    for shard in source.shards:
        try:
            yield from source.read(shard, 0, 1)
        except RecordError as error:
            yield error


def read_or_error(source: Source, index: int) -> Sample | RecordError:
    """Return a sample, or the RecordError if it is broken."""
    try:
        sample: Sample = source.read(index)
    except RecordError as error:
        return error
    return sample


def _time_reads(
    order: Literal["sequential", "random"], records: Iterator[Sample | RecordError], seconds: float
) -> ReadSpeed:
    samples = nbytes = errors = 0
    started = now = time.perf_counter()
    for record in records:
        now = time.perf_counter()
        if isinstance(record, RecordError):
            errors += 1
        else:
            samples += 1
            nbytes += nbytes_of(record)
        if now - started > seconds:
            break
    return ReadSpeed(order=order, samples=samples, nbytes=nbytes, duration_s=now - started, errors=errors)
