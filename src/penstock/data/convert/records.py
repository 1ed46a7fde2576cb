"""A source as numbered records: every process opens it in the same way, and reads any range of it.

Records are numbered from 0, through all shards of a stream in their order. A broken record keeps its number. What a
source holds, its schema and how many records each shard has, is what its format declares, or else what a scan finds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import islice, pairwise
from typing import Any

import numpy as np

from penstock.core.errors import RecordError, SourceError
from penstock.data.convert.workers import Context, WorkerPool
from penstock.data.format import Format
from penstock.data.format_registry import format_of_path
from penstock.data.open import open as open_source
from penstock.data.sample_nbytes import nbytes_of
from penstock.data.schema import Errors, Field, Sample, Schema, merge_schemas, schema_of
from penstock.data.source import Source
from penstock.data.storage.storage import Storage, is_remote
from penstock.data.stream import Stream

_VOLATILE_FILES = ("lock.mdb",)
_SIZE_SAMPLES = 8
"""Samples that the size of all is estimated from."""
_SHAPE_SAMPLES = 64
"""Samples that show whether sizes that are declared as variable are equal."""
_RANGE_RECORDS = 20_000
_MAX_RANGES = 10_000


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
        with warnings.catch_warnings():  # the conversion has opened the source before, and shown its warnings
            warnings.simplefilter("ignore", UserWarning)
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


def kept_reader(context: Context, spec: SourceSpec) -> RecordReader:
    """Return the reader of a source that a process keeps."""
    return context.kept(repr(spec), partial(RecordReader, spec))


def read_records(
    context: Context, *, spec: SourceSpec, ranges: tuple[RecordRange, ...], errors: Errors
) -> list[Sample | RecordError]:
    """Return some records: what a worker does for a file that another process writes."""
    return list(kept_reader(context, spec).read_ranges(ranges, errors))


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


def known_counts(source: Source | Stream) -> tuple[int, ...] | None:
    """Return the number of records of each shard, where it is known without reading them."""
    if isinstance(source, Source):
        return (len(source),)
    counts = [shard.count for shard in source.shards]
    return None if None in counts else tuple(count or 0 for count in counts)


def source_files(kind: Format, paths: list[str], storage: Storage) -> dict[str, Any]:
    """Return how many files a format would read of these paths, their bytes, and a digest of names and versions."""
    listed = [_remote_files(kind, one, storage) if is_remote(one) else files_of(os.path.abspath(one)) for one in paths]
    files = [one for some in listed for one in some if os.path.basename(one) not in _VOLATILE_FILES]
    files = [one for one in files if os.path.exists(one) or not os.path.islink(one)]  # a link may be dangling
    versions = storage.file_versions(files)
    names = "".join(f"{name}\0{one.nbytes}\0{one.version}\n" for name, one in zip(files, versions, strict=True))
    digest = hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()
    return {"files": len(files), "nbytes": sum(one.nbytes for one in versions), "digest": digest}


def files_of(path: str) -> list[str]:
    """Return a file, or all files of a folder, sorted."""
    if not os.path.isdir(path):
        return [path]
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)


def _remote_files(kind: Format, path: str, storage: Storage) -> list[str]:
    is_folder = kind.reads_folders and (path.endswith("/") or format_of_path(path) is None)
    return storage.list(path) if is_folder else [path]


# ── what a source holds ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Contents:
    """What a source holds, or a range of it."""

    schema: Schema | None
    """None for a range without samples."""
    counts: tuple[int, ...]
    """The records of each shard, including broken ones."""
    truncated_shards: int = 0
    """Shards whose rest cannot be read; only with errors="skip"."""
    nbytes: int = 0
    """About the bytes of all samples."""
    has_numbers: bool = False
    """Whether any range can be read without what is before it."""

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Contents:
        """Return the contents that `asdict` made `entry` of."""
        fields = {name: Field(**{**one, "shape": tuple(one["shape"])}) for name, one in entry["schema"].items()}
        return cls(**{**entry, "schema": fields, "counts": tuple(entry["counts"])})


def read_contents(spec: SourceSpec, errors: Errors, pool: WorkerPool) -> Contents:
    """Return what a source holds; scans all of it where its format does not declare that.

    Also scans where sizes are declared as variable and the first samples have equal ones: arrays of a fixed size take
    less room in the result.

    Raises:
        SourceError: samples differ in their fields, or there is none to find the fields of.
        RecordError: a record is broken, and `errors` is "raise".
    """
    with closing(RecordReader(spec)) as reader:
        source, counts = reader.source, known_counts(reader.source)
        base = Stream if isinstance(source, Stream) else Source
        declared = source.schema if type(source).schema is not base.schema else None
        if declared is not None and counts is not None and not _may_be_fixed_size(source, declared):
            nbytes = _estimate_nbytes(reader, declared, counts)
            return Contents(declared, counts, nbytes=nbytes, has_numbers=isinstance(source, Source))
        shards = 1 if isinstance(source, Source) else len(source.shards)
        ranges = _scan_ranges(counts if isinstance(source, Source) else None, shards, pool.count)
    scan = partial(_scan_range, spec=spec, errors=errors)
    results = pool.run("scanning range", [partial(scan, wanted=one) for one in ranges])
    schema = _merge([one.schema for one in results], source.where)
    if schema is not None and declared is not None:  # samples do not have units
        schema = {name: replace(field, unit=declared[name].unit) for name, field in schema.items()}
    schema = schema or declared
    if schema is None:
        raise SourceError(f"{source.where} has no samples, and so no fields")
    per_shard, truncated = [0] * shards, set()
    for wanted, one in zip(ranges, results, strict=True):
        per_shard[wanted.shard] += one.counts[0]
        truncated |= {wanted.shard} if one.truncated_shards else set()
    nbytes = sum(one.nbytes for one in results)
    return Contents(schema, tuple(per_shard), len(truncated), nbytes, isinstance(source, Source))


def _merge(schemas: Sequence[Schema | None], where: str) -> Schema | None:
    found = [schema for schema in schemas if schema is not None]
    return reduce(partial(merge_schemas, where=where), found) if found else None


def _may_be_fixed_size(source: Source | Stream, declared: Schema) -> bool:
    """Return whether arrays of declared variable sizes have equal sizes in the first samples."""
    if isinstance(source, Stream) or not any(field.is_ragged for field in declared.values()):
        return False
    try:
        schemas = [schema_of(source[index], source.where) for index in range(min(len(source), _SHAPE_SAMPLES))]
    except SourceError:  # reported when the record is converted
        return False
    return all(schema == schemas[0] for schema in schemas) and bool(schemas)


def _scan_ranges(counts: tuple[int, ...] | None, shards: int, workers: int) -> list[RecordRange]:
    """Return the ranges to scan: contiguous ones where records have numbers, else shards, or every n-th record."""
    if counts is not None:
        total = sum(counts)
        count = max(1, min(total, max(4 * workers, total // _RANGE_RECORDS), _MAX_RANGES))
        ends = [total * number // count for number in range(count + 1)]
        return [RecordRange(0, first, stop) for first, stop in pairwise(ends)]
    step = max(1, -(-workers // max(1, shards)))
    return [RecordRange(shard, first, None, step) for shard in range(shards) for first in range(step)]


def _estimate_nbytes(reader: RecordReader, schema: Schema, counts: tuple[int, ...]) -> int:
    total = sum(counts)
    if all(field.nbytes() or field.kind == "number" for field in schema.values()):
        return total * sum(field.nbytes() or np.dtype(field.dtype).itemsize for field in schema.values())
    sizes = []
    for number in sorted({total * one // _SIZE_SAMPLES for one in range(_SIZE_SAMPLES)} if total else ()):
        for wanted in ranges_between(counts, number, number + 1):
            sizes += [nbytes_of(record) for record in reader.records(wanted) if not isinstance(record, RecordError)]
    return total * sum(sizes) // max(1, len(sizes))


def _scan_range(context: Context, *, spec: SourceSpec, wanted: RecordRange, errors: Errors) -> Contents:
    """Read a range of a source to find its schema and count its records."""
    records = nbytes = truncated = 0
    schema: Schema | None = None
    known: set[Any] = set()
    reader = kept_reader(context, spec)
    try:
        for record in reader.records(wanted):
            records += 1
            if isinstance(record, RecordError):
                if errors == "raise":
                    raise record
                continue
            signature = tuple((name, type(value), *_size_of(value)) for name, value in record.items())
            if signature not in known:  # costs much less than a schema
                schema = _merge([schema, schema_of(record, reader.source.where)], reader.source.where)
                known.add(signature)
            size = nbytes_of(record)
            nbytes += size
            context.count(1, size)
    except RecordError:
        if errors == "raise":
            raise
        truncated = 1
    return Contents(schema, (records,), truncated, nbytes)


def _size_of(value: object) -> tuple[Any, ...]:
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape
    return () if isinstance(value, bool | int | float | complex | str | bytes | np.generic) else (object(),)
