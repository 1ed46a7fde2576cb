"""What tasks do with segments: write one, check one of an earlier attempt, join several, count the samples of a file.

Each segment lies in a folder, as "data" with the suffix of the target. Some formats write several files; the names of
the others begin with "data", too.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from penstock.core.errors import RecordError, SourceError
from penstock.data.convert.canonical_bytes import DatasetChecksum
from penstock.data.convert.numbered_records import RecordRange, RecordReader, SourceSpec, known_counts
from penstock.data.convert.target import files_of, nbytes_of, sync
from penstock.data.convert.task import TaskContext
from penstock.data.format_registry import format_named
from penstock.data.schema import Errors, Schema

_READ_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WrittenSegment:
    """A segment that is complete on the disk."""

    number: int
    checksum: DatasetChecksum
    skipped: int
    file_nbytes: int
    crc32: int

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> WrittenSegment:
        """Return the segment of a journal's entry, which `asdict` made."""
        return cls(**{**entry, "checksum": DatasetChecksum(**entry["checksum"])})


def write_segment(
    context: TaskContext,
    *,
    number: int,
    spec: SourceSpec,
    ranges: tuple[RecordRange, ...],
    errors: Errors,
    schema: Schema,
    format: str,
    options: dict[str, Any],
    folder: str,
    suffix: str,
) -> WrittenSegment:
    """Write some records to the file of a segment, and return its checksums."""
    checksum, skipped = DatasetChecksum(), 0
    open_writer = format_named(format).writer
    assert open_writer is not None
    with atomic_folder(folder) as temporary:
        writer = open_writer(data_path(temporary, suffix), schema, **options)
        for record in context.reader(spec).read_ranges(ranges, errors):
            if isinstance(record, RecordError):
                skipped += 1
                continue
            nbytes = checksum.add(record)
            writer.write(record)
            context.count(1, nbytes)
        writer.close()
    return WrittenSegment(number, checksum, skipped, nbytes_of(folder), crc32_of(folder))


def is_intact(context: TaskContext, *, folder: str, written: WrittenSegment) -> bool:
    """Return whether a segment that an earlier attempt wrote is what the journal recorded."""
    return os.path.exists(folder) and (nbytes_of(folder), crc32_of(folder)) == (written.file_nbytes, written.crc32)


def join_segments(context: TaskContext, *, format: str, folders: list[str], folder: str, suffix: str) -> int:
    """Join the files of several segments to one, and return its size."""
    concat_files = format_named(format).concat_files
    assert concat_files is not None
    with atomic_folder(folder) as temporary:
        concat_files([data_path(one, suffix) for one in folders], data_path(temporary, suffix))
    return nbytes_of(folder)


def check_count(context: TaskContext, *, path: str, format: str, options: dict[str, Any], expected: int) -> None:
    """Check that a file has as many samples as were written to it."""
    with closing(RecordReader(SourceSpec.create((path,), format=format, options=options))) as reader:
        counts = known_counts(reader.source)
        if counts is not None:
            found = counts.total
        else:  # skipping samples is cheaper than making them
            last = max(0, expected - 1)
            found = last + sum(1 for _ in islice(reader.records(RecordRange(0, last, None)), 2))
    if found != expected:
        raise SourceError(f"{path} holds {found} samples; {expected} were written to it")


def crc32_of(path: str) -> int:
    """Return the CRC-32 of a file; of a folder, that of its files' names and bytes, by name."""
    crc = 0
    for name in files_of(path):
        crc = zlib.crc32(os.path.relpath(name, path).encode(), crc)
        with open(name, "rb") as file:
            while data := file.read(_READ_NBYTES):
                crc = zlib.crc32(data, crc)
    return crc


def data_path(folder: str, suffix: str) -> str:
    """Return the path of the file that a format writes in a segment's folder."""
    return os.path.join(folder, f"data{suffix}")


@contextmanager
def atomic_folder(path: str) -> Iterator[str]:
    """Yield a new folder to write in, which is synced and renamed to `path` at the end, or removed after an error."""
    parent, name = os.path.split(path)
    temporary = os.path.join(parent, f"new-{os.getpid()}-{name}")
    shutil.rmtree(temporary, ignore_errors=True)
    os.mkdir(temporary)
    try:
        yield temporary
        for one in [*files_of(temporary), *(folder for folder, _, _ in os.walk(temporary))]:
            sync(one)
        shutil.rmtree(path, ignore_errors=True)
        os.rename(temporary, path)
        sync(parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
