"""Looking through a part of a source: its schema, and how many records there are."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.errors import RecordError
from penstock.feed.convert.reading import Recipe, Stretch
from penstock.feed.convert.tasks import Bench
from penstock.feed.sources.measure import nbytes_of
from penstock.feed.sources.sample import Errors, Schema, schema_of, widened


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
                schema = schema_of(record) if schema is None else widened(schema, record, reader.source.where)
                size = nbytes_of(record)
                nbytes += size
                bench.count(1, size)
        except RecordError:
            if self.errors == "raise":
                raise
            is_cut = True
        return Looked(number=self.number, records=records, skipped=skipped, is_cut=is_cut, nbytes=nbytes, schema=schema)
