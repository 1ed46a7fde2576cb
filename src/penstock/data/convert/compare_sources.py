"""Compares two sources sample by sample, in parallel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import zip_longest

from penstock.core.errors import RecordError, SourceError
from penstock.data.convert.canonical_bytes import DatasetChecksum, describe_difference
from penstock.data.convert.converter_pool import ConverterPool
from penstock.data.convert.numbered_records import SourceSpec, ranges_between
from penstock.data.convert.task import TaskContext
from penstock.data.schema import Errors, Sample

_TASK_RECORDS = 4096

Counts = tuple[int, ...]
"""The records of each shard."""


def compare_sources(
    one: SourceSpec,
    other: SourceSpec,
    counts: tuple[Counts, Counts],
    pool: ConverterPool,
    *,
    errors: Errors,
    same_numbers: bool,
    is_ordered: bool,
) -> DatasetChecksum:
    """Read two sources, raise if they do not hold equal samples, and return the checksum of these.

    Where equal records have the `same_numbers`, ranges are compared in parallel; else one task compares all. Of sources
    that are not `is_ordered` only the checksums are compared.
    """
    longest = max(map(sum, counts))
    size = _TASK_RECORDS if not is_ordered or (same_numbers and sum(counts[0]) == sum(counts[1])) else max(1, longest)
    ranges = [(first, first + size) for first in range(0, longest, size)]
    if is_ordered:
        compare = partial(compare_records, specs=(one, other), counts=counts, errors=errors)
        return DatasetChecksum.total(
            pool.run("comparing records, task", [partial(compare, between=between) for between in ranges])
        )
    checksums = []
    for spec, its_counts in zip((one, other), counts, strict=True):
        read = partial(sum_records, spec=spec, counts=its_counts, errors=errors)
        checksums.append(
            DatasetChecksum.total(
                pool.run("reading records, task", [partial(read, between=between) for between in ranges])
            )
        )
    if checksums[0] != checksums[1]:
        raise SourceError(f"{_name(one)} and {_name(other)} differ: they do not hold the same samples")
    return checksums[0]


def compare_records(
    context: TaskContext,
    *,
    specs: tuple[SourceSpec, SourceSpec],
    counts: tuple[Counts, Counts],
    between: tuple[int, int],
    errors: Errors,
) -> DatasetChecksum:
    """Raise if two sources differ in some records, and return the checksum of these."""
    both = [iter_samples(context, spec, its, between, errors) for spec, its in zip(specs, counts, strict=True)]
    checksum, difference = DatasetChecksum(), ""
    for sample, counterpart in zip_longest(*both):
        number = between[0] + checksum.samples
        if sample is None or counterpart is None:
            shorter, longer = ("first", "second") if sample is None else ("second", "first")
            difference = f"the {shorter} has {number} samples, and the {longer} has more"
        elif text := describe_difference(sample, counterpart):
            difference = f"sample {number}: {text}"
        if difference:
            raise SourceError(f"{_name(specs[0])} and {_name(specs[1])} differ: {difference}")
        context.count(1, checksum.add(sample))
    return checksum


def sum_records(
    context: TaskContext, *, spec: SourceSpec, counts: Counts, between: tuple[int, int], errors: Errors
) -> DatasetChecksum:
    """Return the checksum of some records."""
    checksum = DatasetChecksum()
    for sample in iter_samples(context, spec, counts, between, errors):
        context.count(1, checksum.add(sample))
    return checksum


def iter_samples(
    context: TaskContext, spec: SourceSpec, counts: Counts, between: tuple[int, int], errors: Errors
) -> Iterator[Sample]:
    """Return the samples of some of a source's records; broken ones are left out if `errors` is "skip"."""
    records = context.reader(spec).read_ranges(ranges_between(counts, *between), errors)
    return (record for record in records if not isinstance(record, RecordError))


def _name(spec: SourceSpec) -> str:
    return spec.path if isinstance(spec.path, str) else ", ".join(spec.path[:3])
