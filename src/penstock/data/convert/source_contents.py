"""The schema and the record counts of a source: as its format declares them, or from a scan of all records.

The scan runs in parallel. What was found in a range is kept in the conversion's folder, so that it is scanned once.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.core.errors import RecordError, SourceError
from penstock.data.convert.converter_pool import ConverterPool
from penstock.data.convert.numbered_records import (
    RecordRange,
    RecordReader,
    SourceSpec,
    declared_schema,
    known_counts,
    ranges_between,
)
from penstock.data.convert.partial_folder import read_json, write_json
from penstock.data.convert.task import TaskContext
from penstock.data.sample_nbytes import nbytes_of
from penstock.data.schema import Errors, Field, Sample, Schema, merge_schemas, schema_of
from penstock.data.source import Source
from penstock.data.stream import Stream

_SIZE_SAMPLES = 8
"""Samples that the size of all is estimated from."""
_SHAPE_SAMPLES = 64
"""Samples that show whether sizes that are declared as variable are equal."""
_RANGE_RECORDS = 20_000
_MAX_RANGES = 10_000
_MAX_SIGNATURES = 10_000


@dataclass(frozen=True, slots=True)
class SourceContents:
    """What a source holds, or a range of it."""

    schema: Schema | None
    """None for a range without samples."""
    counts: tuple[int, ...]
    """The records of each shard, including broken ones."""
    truncated_shards: int = 0
    """Shards whose rest cannot be read; only with errors="skip"."""
    nbytes: int = 0
    """About the bytes of all samples."""

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> SourceContents:
        """Return the contents that `asdict` made `entry` of."""
        fields = entry["schema"]
        schema = fields and {name: Field(**{**one, "shape": tuple(one["shape"])}) for name, one in fields.items()}
        return cls(**{**entry, "schema": schema, "counts": tuple(entry["counts"])})


def read_contents(spec: SourceSpec, errors: Errors, pool: ConverterPool, partial_folder: str) -> SourceContents:
    """Return what a source holds; scans all of it where its format does not declare that.

    Also scans where sizes are declared as variable and the first samples have equal ones: arrays of a fixed size take
    less room in the result.

    Raises:
        SourceError: samples differ in their fields, or there is none to find the fields of.
        RecordError: a record is broken, and `errors` is "raise".
    """
    with closing(RecordReader(spec)) as reader:
        declared, counts = declared_schema(reader.source), known_counts(reader.source)
        if declared is not None and counts is not None and not _may_be_fixed_size(reader.source, declared):
            return SourceContents(declared, counts, nbytes=_estimate_nbytes(reader, declared, counts))
        shards = 1 if isinstance(reader.source, Source) else len(reader.source.shards)
        ranges = _scan_ranges(counts if isinstance(reader.source, Source) else None, shards, pool.count)
        where = reader.source.where
    scan = partial(scan_range, spec=spec, errors=errors, partial_folder=partial_folder)
    results = pool.run("scanning range", [partial(scan, wanted=one) for one in ranges])
    schema = _merge((one.schema for one in results), where)
    if schema is not None and declared is not None:  # samples do not have units
        schema = {name: replace(field, unit=declared[name].unit) for name, field in schema.items()}
    schema = declared if schema is None else schema
    if schema is None:
        raise SourceError(f"{where} has no samples, and so no fields")
    per_shard, truncated = [0] * shards, set()
    for wanted, one in zip(ranges, results, strict=True):
        per_shard[wanted.shard] += one.counts[0]
        if one.truncated_shards:
            truncated.add(wanted.shard)
    return SourceContents(schema, tuple(per_shard), len(truncated), sum(one.nbytes for one in results))


def _merge(schemas: Iterable[Schema | None], where: str) -> Schema | None:
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


# ── one range ───────────────────────────────────────────────────────────────────────────────────────────────


def scan_range(
    context: TaskContext, *, spec: SourceSpec, wanted: RecordRange, errors: Errors, partial_folder: str
) -> SourceContents:
    """Read a range of a source to find its schema and count its records, unless an earlier attempt has."""
    name = f"scanned-{wanted.shard}-{wanted.first}-{wanted.stop}-{wanted.step}.json"
    earlier = read_json(os.path.join(partial_folder, name))
    if earlier:
        return SourceContents.from_json(earlier)
    records = nbytes = truncated = 0
    schema: Schema | None = None
    known: set[Hashable] = set()
    reader = context.reader(spec)
    try:
        for record in reader.records(wanted):
            records += 1
            if isinstance(record, RecordError):
                if errors == "raise":
                    raise record
                continue
            signature = _signature(record)
            if signature not in known:
                schema = _merge((schema, schema_of(record, reader.source.where)), reader.source.where)
            if len(known) < _MAX_SIGNATURES:
                known.add(signature)
            size = nbytes_of(record)
            nbytes += size
            context.count(1, size)
    except RecordError:
        if errors == "raise":
            raise
        truncated = 1
    contents = SourceContents(schema, (records,), truncated, nbytes)
    write_json(os.path.join(partial_folder, name), asdict(contents))
    return contents


def _signature(sample: Sample) -> Hashable:
    """Return a key that is equal only for samples with equal schemas. It costs much less than a schema."""
    return tuple(
        (name, value.dtype, value.shape) if isinstance(value, np.ndarray) else (name, _type_key(value))
        for name, value in sample.items()
    )


def _type_key(value: object) -> Hashable:
    is_simple = isinstance(value, bool | int | float | complex | str | bytes | np.generic)
    return type(value) if is_simple else object()  # a key of its own: values of other types are examined each time
