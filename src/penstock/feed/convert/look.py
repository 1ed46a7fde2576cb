"""Looking through a part of a source: its schema, and how many records there are."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from penstock.core.errors import RecordError, SourceError
from penstock.feed.convert.reading import Recipe, Stretch
from penstock.feed.convert.tasks import Bench
from penstock.feed.sources.measure import nbytes_of
from penstock.feed.sources.sample import Errors, Sample, Schema, field_of, widened

_MOST_KNOWN = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Looked:
    """What was found in one part of a source."""

    number: int
    records: int
    """Also broken ones."""
    skipped: int
    is_cut: bool
    """Whether the shard's rest could not be read."""
    nbytes: int
    """Of the samples' values."""
    schema: Schema | None
    """None where there was no sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Look through a part of a source for its schema, and count its records."""

    number: int
    recipe: Recipe
    stretch: Stretch
    errors: Errors

    def run(self, bench: Bench) -> Looked:
        """Return what is there."""
        records = skipped = nbytes = 0
        schema: Schema | None = None
        known: set[Hashable] = set()
        is_cut = False
        reader = bench.reader(self.recipe)
        try:
            for record in reader.records(self.stretch):
                records += 1
                if isinstance(record, RecordError):
                    if self.errors == "raise":
                        raise record
                    skipped += 1
                    continue
                kind = _kind_of(record)
                if kind not in known:
                    own = _schema_of(record, reader.source.where)
                    schema = own if schema is None else widened(schema, record, reader.source.where)
                if len(known) < _MOST_KNOWN:
                    known.add(kind)
                size = nbytes_of(record)
                nbytes += size
                bench.count(1, size)
        except RecordError:
            if self.errors == "raise":
                raise
            is_cut = True
        return Looked(number=self.number, records=records, skipped=skipped, is_cut=is_cut, nbytes=nbytes, schema=schema)


def _schema_of(sample: Sample, where: str) -> Schema:
    """Return a sample's schema.

    Raises:
        SourceError: a field holds something that formats have no room for; the message names it.
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


def _kind_of(sample: Sample) -> Hashable:
    """Return what tells whether two samples have one schema: much cheaper than the schemas."""
    return tuple(
        (name, value.dtype, value.shape) if isinstance(value, np.ndarray) else (name, _type_of(value))
        for name, value in sample.items()
    )


def _type_of(value: object) -> Hashable:
    kind: type = type(value)
    is_simple = isinstance(value, bool | int | float | complex | str | bytes | np.generic)
    return kind if is_simple else object()  # anything else is looked at each time
