"""What tasks do with a file of the result: write it, in a folder of its own, and read it again."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import Any

from penstock.core.errors import RecordError, SourceError
from penstock.data.convert.canonical_bytes import DatasetChecksum
from penstock.data.convert.partial_folder import Written, atomic_folder
from penstock.data.convert.records import RecordRange, RecordReader, SourceSpec, kept_reader
from penstock.data.convert.target import Target, remove
from penstock.data.convert.workers import Context
from penstock.data.schema import Errors, Sample, Schema
from penstock.data.source import Source


def write_file(
    context: Context,
    *,
    spec: SourceSpec,
    ranges: tuple[RecordRange, ...],
    errors: Errors,
    schema: Schema,
    target: Target,
    options: dict[str, Any],
    folder: str,
    records: Iterable[Sample | RecordError] | None = None,
) -> tuple[Written, bool]:
    """Write some records to a file; return what it holds, and whether an earlier attempt wrote it.

    Args:
        context: of the process.
        spec: the source.
        ranges: of the records.
        errors: what to do with those that are broken.
        schema: of all samples.
        target: says what file.
        options: of its writer.
        folder: gets its name when the file is complete.
        records: those of the ranges, where others read them.
    """
    earlier = Written.load(folder)
    if earlier is not None:
        context.count(earlier.checksum.samples, 0)
        return earlier, True
    checksum, skipped = DatasetChecksum(), 0
    open_writer = target.kind.writer
    assert open_writer is not None
    with atomic_folder(folder) as temporary:
        writer = open_writer(target.data_path(temporary), schema, **options)
        for record in kept_reader(context, spec).read_ranges(ranges, errors) if records is None else records:
            if isinstance(record, RecordError):
                skipped += 1
                continue
            nbytes = checksum.add(record)
            writer.write(record)
            context.count(1, nbytes)
        writer.close()
        written = Written(checksum, skipped)
        written.record(temporary)
    return written, False


def check_file(
    context: Context, *, spec: SourceSpec, expected: DatasetChecksum, target: Target, is_ordered: bool, folder: str
) -> None:
    """Read a file again, and compare its samples with those that were written; one that differs is removed.

    Raises:
        SourceError: they differ.
    """
    found = DatasetChecksum()
    with closing(RecordReader(spec)) as reader:
        shards = 1 if isinstance(reader.source, Source) else len(reader.source.shards)
        for shard in range(shards):
            for record in reader.records(RecordRange(shard, 0, None)):
                if isinstance(record, RecordError):
                    raise record
                context.count(1, found.add(record))
    if (found if is_ordered else found.unordered()) != (expected if is_ordered else expected.unordered()):
        remove(folder)
        raise SourceError(f"{target.path}: samples that were read of the result differ from those of the source")
