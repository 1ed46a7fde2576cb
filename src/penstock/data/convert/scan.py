"""Scanning a range of a source: its schema, and how many records it has."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from penstock.core.errors import RecordError, SourceError
from penstock.data.convert.numbered_records import RecordRange, SourceSpec
from penstock.data.convert.task import TaskContext
from penstock.data.sample_nbytes import nbytes_of
from penstock.data.schema import Errors, Sample, Schema, field_of, merge_schemas

_MAX_SIGNATURES = 10_000


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
    """Return a sample's schema.

    Raises:
        SourceError: a field has a value of an unsupported type; the message has its name.
    """
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
