"""The schema and the record counts of a source: as its format declares them, or from a scan of all records.

The scan runs in parallel, and is journaled by range, so that a resumed conversion does not repeat it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.core.errors import RecordError, SourceError
from penstock.data.convert.converter_pool import ConverterPool, ReportProgress
from penstock.data.convert.journal import Journal
from penstock.data.convert.numbered_records import (
    RecordCounts,
    RecordRange,
    RecordReader,
    SourceSpec,
    declared_schema,
    known_counts,
)
from penstock.data.convert.task import Task, TaskContext
from penstock.data.sample_nbytes import nbytes_of
from penstock.data.schema import Errors, Field, Sample, Schema, field_of, merge_schemas, schema_of
from penstock.data.source import Source
from penstock.data.stream import Stream

_SIZE_SAMPLES = 8
"""Samples that the size of all is estimated from."""
_SHAPE_SAMPLES = 64
"""Samples that show whether sizes that are declared as variable are equal."""
_RANGE_RECORDS = 20_000
_MAX_RANGES = 10_000
_MAX_SIGNATURES = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceContents:
    """What a source holds."""

    schema: Schema
    counts: RecordCounts
    truncated_shards: int = 0
    """Shards whose rest cannot be read; only with errors="skip"."""
    nbytes: int = 0
    """About the bytes of all samples."""


def schema_from_json(entry: dict[str, Any]) -> Schema:
    """Return the schema whose fields `asdict` made `entry` of."""
    return {name: Field(**{**field, "shape": tuple(field["shape"])}) for name, field in entry.items()}


def read_contents(
    spec: SourceSpec,
    errors: Errors,
    pool: ConverterPool,
    workers: int,
    report: ReportProgress,
    journal: Journal | None = None,
) -> SourceContents:
    """Return what a source holds; scans all of it where its format does not declare that.

    Also scans where sizes are declared as variable and the first samples have equal ones: arrays of a fixed size take
    less room in the result.

    Raises:
        SourceError: samples differ in their fields, or there is none to find the fields of.
        RecordError: a record is broken, and `errors` is "raise".
    """
    reader = RecordReader(spec)
    try:
        declared, counts = declared_schema(reader.source), known_counts(reader.source)
        if declared is not None and counts is not None and not _may_be_fixed_size(reader.source, declared):
            return SourceContents(schema=declared, counts=counts, nbytes=_estimate_nbytes(reader, declared, counts))
        shards = 1 if isinstance(reader.source, Source) else len(reader.source.shards)
        ranges = _scan_ranges(counts if isinstance(reader.source, Source) else None, shards, workers)
        where = reader.source.where
    finally:
        reader.close()
    ranges, results = _scan(spec, ranges, errors, pool, report, journal)
    schema: Schema | None = None
    for one in results:
        if one.schema is not None:
            schema = one.schema if schema is None else merge_schemas(schema, one.schema, where)
    if schema is not None and declared is not None:  # samples do not have units
        schema = {name: replace(field, unit=declared[name].unit) for name, field in schema.items()}
    schema = schema or declared
    if schema is None:
        raise SourceError(f"{where} has no samples, and so no fields")
    per_shard, truncated = [0] * shards, set()
    for one in results:
        shard = ranges[one.number].shard
        per_shard[shard] += one.records
        if one.is_truncated:
            truncated.add(shard)
    return SourceContents(
        schema=schema,
        counts=RecordCounts(tuple(per_shard)),
        truncated_shards=len(truncated),
        nbytes=sum(one.nbytes for one in results),
    )


def _may_be_fixed_size(source: Source | Stream, declared: Schema) -> bool:
    """Return whether arrays of declared variable sizes have equal sizes in the first samples."""
    if isinstance(source, Stream) or not any(field.is_ragged for field in declared.values()):
        return False
    try:
        schemas = [schema_of(source[index]) for index in range(min(len(source), _SHAPE_SAMPLES))]
    except SourceError:  # reported when the record is converted
        return False
    return all(schema == schemas[0] for schema in schemas) and bool(schemas)


def _scan_ranges(counts: RecordCounts | None, shards: int, workers: int) -> list[RecordRange]:
    """Return the ranges to scan: contiguous ones where records have numbers, else shards, or every n-th record."""
    if counts is not None:
        total = counts.total
        count = max(1, min(total, max(4 * workers, total // _RANGE_RECORDS), _MAX_RANGES))
        ends = [total * number // count for number in range(count + 1)]
        return [RecordRange(0, first, stop) for first, stop in pairwise(ends)]
    step = max(1, -(-workers // max(1, shards)))
    return [RecordRange(shard, first, None, step) for shard in range(shards) for first in range(step)]


def _scan(
    spec: SourceSpec,
    ranges: list[RecordRange],
    errors: Errors,
    pool: ConverterPool,
    report: ReportProgress,
    journal: Journal | None,
) -> tuple[list[RecordRange], list[ScanResult]]:
    """Scan the ranges, or those of the journal that an earlier attempt left; return the ranges and all results."""
    results: dict[int, ScanResult] = {}
    if journal is not None:
        started = journal.last("scan_started")
        if started is None:
            journal.append("scan_started", ranges=[[one.shard, one.first, one.stop, one.step] for one in ranges])
        else:
            ranges = [RecordRange(*one) for one in started["ranges"]]
        for entry in journal.all("range_scanned"):
            schema = None if entry["schema"] is None else schema_from_json(entry["schema"])
            results[entry["number"]] = ScanResult(**{**entry, "schema": schema})
    tasks = [
        Task("scanning range", number, partial(scan_range, number=number, spec=spec, wanted=one, errors=errors))
        for number, one in enumerate(ranges)
        if number not in results
    ]
    for _, found in pool.run(tasks, report):
        results[found.number] = found
        if journal is not None:
            journal.append("range_scanned", **asdict(found))
    return ranges, [results[number] for number in sorted(results)]


def _estimate_nbytes(reader: RecordReader, schema: Schema, counts: RecordCounts) -> int:
    """Return about how many bytes all samples have."""
    if all(field.nbytes() or field.kind == "number" for field in schema.values()):
        return counts.total * sum(field.nbytes() or np.dtype(field.dtype).itemsize for field in schema.values())
    sizes = []
    numbers = {counts.total * one // _SIZE_SAMPLES for one in range(_SIZE_SAMPLES)} if counts.total else set()
    for number in sorted(numbers):
        for wanted in counts.ranges(number, number + 1):
            sizes += [nbytes_of(record) for record in reader.records(wanted) if not isinstance(record, RecordError)]
    return counts.total * sum(sizes) // max(1, len(sizes))


# ── one range ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ScanResult:
    """What was found in one range of a source."""

    number: int
    records: int
    """Including broken ones."""
    skipped: int
    is_truncated: bool
    """Whether the rest of the shard could not be read."""
    nbytes: int
    """Of the samples' values."""
    schema: Schema | None
    """None if there was no sample."""


def scan_range(
    context: TaskContext, *, number: int, spec: SourceSpec, wanted: RecordRange, errors: Errors
) -> ScanResult:
    """Read a range of a source to find its schema and count its records."""
    records = skipped = nbytes = 0
    schema: Schema | None = None
    known: set[Hashable] = set()
    is_truncated = False
    reader = context.reader(spec)
    try:
        for record in reader.records(wanted):
            records += 1
            if isinstance(record, RecordError):
                if errors == "raise":
                    raise record
                skipped += 1
                continue
            signature = _signature(record)
            if signature not in known:
                own = _schema_of(record, reader.source.where)
                schema = own if schema is None else merge_schemas(schema, own, reader.source.where)
            if len(known) < _MAX_SIGNATURES:
                known.add(signature)
            size = nbytes_of(record)
            nbytes += size
            context.count(1, size)
    except RecordError:
        if errors == "raise":
            raise
        is_truncated = True
    return ScanResult(number, records, skipped, is_truncated, nbytes, schema)


def _schema_of(sample: Sample, where: str) -> Schema:
    """Return a sample's schema."""
    schema = {}
    for name, value in sample.items():
        try:
            schema[name] = field_of(value)
        except SourceError as error:
            raise SourceError(
                f"{where}: {name!r}: {error}; choose or rename fields with fields= (--fields a,new=old)"
            ) from error
    return schema


def _signature(sample: Sample) -> Hashable:
    """Return a key that is equal only for samples with equal schemas. It costs much less than a schema."""
    return tuple(
        (name, value.dtype, value.shape) if isinstance(value, np.ndarray) else (name, _type_key(value))
        for name, value in sample.items()
    )


def _type_key(value: object) -> Hashable:
    is_simple = isinstance(value, bool | int | float | complex | str | bytes | np.generic)
    return type(value) if is_simple else object()  # a key of its own: values of other types are examined each time
