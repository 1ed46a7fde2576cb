"""A source as numbered records: every process opens it in the same way, and reads any range of it.

Records are numbered from 0, through all shards of a stream in their order. A broken record keeps its number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from penstock.core.errors import RecordError, SourceError
from penstock.data.open import open as open_source
from penstock.data.schema import Errors, Sample, Schema
from penstock.data.source import Source
from penstock.data.stream import Stream


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """How a source is opened, the same way in every process: the arguments of `penstock.open`."""

    path: str | list[str]
    format: str | None
    fields: Mapping[str, str] | list[str] | None
    options: Mapping[str, Any]

    def open(self) -> Source | Stream:
        """Open the source."""
        return open_source(self.path, format=self.format, fields=self.fields, **self.options)


@dataclass(frozen=True, slots=True)
class RecordRange:
    """Records of one shard, numbered within it; a map-style source is shard 0."""

    shard: int
    first: int
    stop: int | None
    """None for the end of the shard."""
    step: int = 1


def ranges_between(counts: Sequence[int], first: int, stop: int) -> tuple[RecordRange, ...]:
    """Return where records `first` to `stop` lie in shards that have so many records each.

    >>> ranges_between((3, 0, 4), 2, 5)
    (RecordRange(shard=0, first=2, stop=3, step=1), RecordRange(shard=2, first=0, stop=2, step=1))
    """
    ends = np.cumsum(counts)
    found = []
    for shard in range(int(np.searchsorted(ends, first, "right")), len(counts)):
        start = int(ends[shard]) - counts[shard]
        if start >= stop:
            break
        low, high = max(first - start, 0), min(stop - start, counts[shard])
        if low < high:
            found.append(RecordRange(shard, low, high))
    return tuple(found)


class RecordReader:
    """Reads ranges of one source in one process. A range that begins where the last one ended reuses its iterator."""

    def __init__(self, spec: SourceSpec) -> None:
        self.source = spec.open()
        self._open: tuple[int, int, Iterator[Sample | RecordError]] | None = None
        """Shard and next record of a stream's iterator that is still open."""

    def records(self, wanted: RecordRange) -> Iterator[Sample | RecordError]:
        """Yield a range's samples, and a RecordError in the place of each broken one.

        Raises:
            RecordError: nothing after it can be read.
        """
        if isinstance(self.source, Stream):
            return self._read_stream(self.source, wanted)
        return self._read_by_index(self.source, wanted)

    def read_ranges(self, ranges: tuple[RecordRange, ...], errors: Errors) -> Iterator[Sample | RecordError]:
        """Yield the records of ranges whose ends are known; if `errors` is "raise", a broken one is raised.

        Raises:
            SourceError: a range has fewer records than it had.
        """
        for one in ranges:
            count, expected = 0, len(range(one.first, one.stop or 0))
            try:
                for record in self.records(one):
                    if isinstance(record, RecordError) and errors == "raise":
                        raise record
                    count += 1
                    yield record
            except RecordError as error:
                if errors == "raise":
                    raise
                yield from [error] * (expected - count)
                count = expected
            if count != expected:
                raise SourceError(
                    f"{self.source.where} has changed while it was read: it had {expected} records, and now {count}"
                )

    def close(self) -> None:
        """Close the source."""
        opened, self._open = self._open, None
        _close(opened[2] if opened is not None else None)
        self.source.close()

    def _read_by_index(self, source: Source, wanted: RecordRange) -> Iterator[Sample | RecordError]:
        stop = len(source) if wanted.stop is None else wanted.stop
        for index in range(wanted.first, stop, wanted.step):
            try:
                sample = source.read(index)
                yield _null_error(source, index, sample) or sample
            except RecordError as error:
                yield error

    def _read_stream(self, stream: Stream, wanted: RecordRange) -> Iterator[Sample | RecordError]:
        opened, self._open = self._open, None
        if opened is not None and opened[:2] == (wanted.shard, wanted.first) and wanted.step == 1:
            records = opened[2]
        else:
            _close(opened[2] if opened is not None else None)
            records = stream.read(stream.shards[wanted.shard], wanted.first, wanted.step)
        count = None if wanted.stop is None else len(range(wanted.first, wanted.stop, wanted.step))
        is_complete = False
        try:
            yield from islice(records, count)
            is_complete = True
        finally:
            if is_complete and wanted.stop is not None and wanted.step == 1:
                self._open = (wanted.shard, wanted.stop, records)
            else:
                _close(records)


def _null_error(source: Source, index: int, sample: Sample) -> RecordError | None:
    """Return the error for a sample with a null, which no format holds that is written; None for one without."""
    for name, value in sample.items():
        if value is None:
            reason = f"field {name!r}: it is null; pass a value to use instead: options={{'null': {{{name!r}: ...}}}}"
            return RecordError(source.where, -1, index, reason)
    return None


def _close(records: Iterator[Any] | None) -> None:
    with contextlib.suppress(AttributeError):  # generators have `close`; other iterators need not
        records.close()  # type: ignore[union-attr]


def declared_schema(source: Source | Stream) -> Schema | None:
    """Return the schema of all samples, where the format declares it; None where only reading them shows it."""
    base = Stream if isinstance(source, Stream) else Source
    return source.schema if type(source).schema is not base.schema else None


def known_counts(source: Source | Stream) -> tuple[int, ...] | None:
    """Return the number of records of each shard, where it is known without reading them."""
    if isinstance(source, Source):
        return (len(source),)
    counts = [shard.count for shard in source.shards]
    return None if None in counts else tuple(count or 0 for count in counts)
