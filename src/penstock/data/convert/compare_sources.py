"""Compares two sources sample by sample, in parallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import ClassVar

from penstock.core.errors import RecordError, SourceError
from penstock.data.convert.canonical_bytes import DatasetChecksum, describe_difference
from penstock.data.convert.converter_pool import ConverterPool, ReportProgress
from penstock.data.convert.numbered_records import RecordCounts, RecordRange, SourceSpec
from penstock.data.convert.task import TaskContext
from penstock.data.schema import Errors, Sample

_TASK_RECORDS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareTask:
    """Compares records of two sources, one by one, in order; broken ones are left out."""

    action: ClassVar[str] = "comparing records, task"

    number: int
    one: SourceSpec
    other: SourceSpec
    one_ranges: tuple[RecordRange, ...]
    other_ranges: tuple[RecordRange, ...]
    first: int
    errors: Errors

    def run(self, context: TaskContext) -> tuple[str, DatasetChecksum]:
        """Return where they first differ, or "", and the checksum of what is equal."""
        pair = zip_longest(
            iter_samples(context, self.one, self.one_ranges, self.errors),
            iter_samples(context, self.other, self.other_ranges, self.errors),
        )
        checksum = DatasetChecksum()
        for one, other in pair:
            number = self.first + checksum.samples
            if one is None or other is None:
                shorter, longer = ("first", "second") if one is None else ("second", "first")
                return f"the {shorter} has {number} samples, and the {longer} has more", checksum
            if text := describe_difference(one, other):
                return f"sample {number}: {text}", checksum
            before = checksum.nbytes
            checksum.add(one)
            context.count(1, checksum.nbytes - before)
        return "", checksum


def iter_samples(
    context: TaskContext, spec: SourceSpec, ranges: tuple[RecordRange, ...], errors: Errors
) -> Iterator[Sample]:
    """Yield the samples of a source's ranges; broken records are left out if `errors` is "skip"."""
    reader = context.reader(spec)
    for one in ranges:
        try:
            for record in reader.records(one):
                if not isinstance(record, RecordError):
                    yield record
                elif errors == "raise":
                    raise record
        except RecordError:
            if errors == "raise":
                raise


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
    """Read two sources, and verify that they hold equal samples in the same order.

    Args:
        one: the first.
        other: the second.
        one_counts: records of the first.
        other_counts: records of the second.
        pool: runs the tasks.
        report: receives the progress.
        errors: "skip" leaves out broken records of either.
        same_numbers: whether equal records have equal numbers, so that ranges can be compared in parallel; else one
            task compares all.
        is_ordered: whether the order has to be equal; else only the checksums are compared.

    Raises:
        SourceError: they differ; the message has the place.
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
        CompareTask(
            number=number,
            one=one,
            other=other,
            one_ranges=one_counts.ranges(first, first + size),
            other_ranges=other_counts.ranges(first, first + size),
            first=first,
            errors=errors,
        )
        for number, first in enumerate(range(0, longest, size))
    ]
    checksum = DatasetChecksum()
    for _, (text, counted) in pool.run(tasks, report):
        if text:
            raise SourceError(f"{_name(one)} and {_name(other)} differ: {text}")
        checksum.merge(counted)
    return checksum


@dataclass(frozen=True, kw_only=True, slots=True)
class ChecksumTask:
    """Computes the checksum of some records."""

    action: ClassVar[str] = "reading records, task"

    number: int
    spec: SourceSpec
    ranges: tuple[RecordRange, ...]
    errors: Errors

    def run(self, context: TaskContext) -> DatasetChecksum:
        """Return the checksum."""
        checksum = DatasetChecksum()
        for sample in iter_samples(context, self.spec, self.ranges, self.errors):
            before = checksum.nbytes
            checksum.add(sample)
            context.count(1, checksum.nbytes - before)
        return checksum


def _checksum_of(
    spec: SourceSpec, counts: RecordCounts, pool: ConverterPool, report: ReportProgress, errors: Errors
) -> DatasetChecksum:
    checksum = DatasetChecksum()
    tasks = [
        ChecksumTask(number=number, spec=spec, ranges=counts.ranges(first, first + _TASK_RECORDS), errors=errors)
        for number, first in enumerate(range(0, counts.total, _TASK_RECORDS))
    ]
    for _, one in pool.run(tasks, report):
        checksum.merge(one)
    return checksum


def _name(spec: SourceSpec) -> str:
    return spec.path if isinstance(spec.path, str) else ", ".join(spec.path[:3])
