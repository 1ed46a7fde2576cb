"""Compares two sources sample by sample, in parallel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import zip_longest

from penstock.core.errors import RecordError, SourceError
from penstock.data.convert.canonical_bytes import DatasetChecksum, describe_difference
from penstock.data.convert.converter_pool import ConverterPool, ReportProgress
from penstock.data.convert.numbered_records import RecordCounts, RecordRange, SourceSpec
from penstock.data.convert.task import Task, TaskContext
from penstock.data.schema import Errors, Sample

_TASK_RECORDS = 4096


def compare_records(
    context: TaskContext,
    *,
    one: SourceSpec,
    other: SourceSpec,
    one_ranges: tuple[RecordRange, ...],
    other_ranges: tuple[RecordRange, ...],
    first: int,
    errors: Errors,
) -> tuple[str, DatasetChecksum]:
    """Return where records of two sources first differ in their order, or "", and the checksum of what is equal."""
    pairs = zip_longest(
        iter_samples(context, one, one_ranges, errors), iter_samples(context, other, other_ranges, errors)
    )
    checksum = DatasetChecksum()
    for sample, counterpart in pairs:
        number = first + checksum.samples
        if sample is None or counterpart is None:
            shorter, longer = ("first", "second") if sample is None else ("second", "first")
            return f"the {shorter} has {number} samples, and the {longer} has more", checksum
        if text := describe_difference(sample, counterpart):
            return f"sample {number}: {text}", checksum
        context.count(1, checksum.add(sample))
    return "", checksum


def sum_records(
    context: TaskContext, *, spec: SourceSpec, ranges: tuple[RecordRange, ...], errors: Errors
) -> DatasetChecksum:
    """Return the checksum of some records."""
    checksum = DatasetChecksum()
    for sample in iter_samples(context, spec, ranges, errors):
        context.count(1, checksum.add(sample))
    return checksum


def iter_samples(
    context: TaskContext, spec: SourceSpec, ranges: tuple[RecordRange, ...], errors: Errors
) -> Iterator[Sample]:
    """Return the samples of a source's ranges; broken records are left out if `errors` is "skip"."""
    records = context.reader(spec).read_ranges(ranges, errors)
    return (record for record in records if not isinstance(record, RecordError))


def compare_sources(
    one: SourceSpec,
    other: SourceSpec,
    one_counts: RecordCounts,
    other_counts: RecordCounts,
    pool: ConverterPool,
    report: ReportProgress,
    *,
    errors: Errors,
    same_numbers: bool,
    is_ordered: bool = True,
) -> DatasetChecksum:
    """Read two sources, raise if they do not hold equal samples, and return the checksum of these.

    Where equal records have the `same_numbers`, ranges are compared in parallel; else one task compares all. Of sources
    that are not `is_ordered` only the checksums are compared.
    """
    if not is_ordered:
        checksums = [
            _checksum_of(spec, counts, pool, report, errors)
            for spec, counts in ((one, one_counts), (other, other_counts))
        ]
        if checksums[0] != checksums[1]:
            raise SourceError(f"{_name(one)} and {_name(other)} differ: they do not hold the same samples")
        return checksums[0]
    total, longest = one_counts.total, max(one_counts.total, other_counts.total)
    size = _TASK_RECORDS if same_numbers and total == other_counts.total else max(1, longest)
    tasks = [
        Task(
            "comparing records, task",
            number,
            partial(
                compare_records,
                one=one,
                other=other,
                one_ranges=one_counts.ranges(first, first + size),
                other_ranges=other_counts.ranges(first, first + size),
                first=first,
                errors=errors,
            ),
        )
        for number, first in enumerate(range(0, longest, size))
    ]
    checksum = DatasetChecksum()
    for _, (text, counted) in pool.run(tasks, report):
        if text:
            raise SourceError(f"{_name(one)} and {_name(other)} differ: {text}")
        checksum.merge(counted)
    return checksum


def _checksum_of(
    spec: SourceSpec, counts: RecordCounts, pool: ConverterPool, report: ReportProgress, errors: Errors
) -> DatasetChecksum:
    ranges = [counts.ranges(first, first + _TASK_RECORDS) for first in range(0, counts.total, _TASK_RECORDS)]
    tasks = [
        Task("reading records, task", number, partial(sum_records, spec=spec, ranges=some, errors=errors))
        for number, some in enumerate(ranges)
    ]
    checksum = DatasetChecksum()
    for _, one in pool.run(tasks, report):
        checksum.merge(one)
    return checksum


def _name(spec: SourceSpec) -> str:
    return spec.path if isinstance(spec.path, str) else ", ".join(spec.path[:3])
