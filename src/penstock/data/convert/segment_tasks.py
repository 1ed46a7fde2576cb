"""Tasks on segments: write one, check one that an earlier attempt wrote, join several, count the samples of a file.

Each segment lies in a folder, as "data" with the suffix of the target. Some formats write several files; the names of
the others begin with "data", too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from penstock.core.errors import RecordError, SourceError
from penstock.data.convert.canonical_bytes import DatasetChecksum
from penstock.data.convert.journal import crc32_of
from penstock.data.convert.numbered_records import RecordRange, RecordReader, SourceSpec, known_counts
from penstock.data.convert.target import nbytes_of, sync_file, sync_folder
from penstock.data.convert.task import TaskContext
from penstock.data.format import Writer
from penstock.data.format_registry import format_named
from penstock.data.schema import Errors, Sample, Schema


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenSegment:
    """A segment that is complete on the disk."""

    number: int
    checksum: DatasetChecksum
    skipped: int
    file_nbytes: int
    crc32: int

    def to_json(self) -> dict[str, Any]:
        """Return it for the journal."""
        return {
            "number": self.number,
            "samples": self.checksum.samples,
            "nbytes": self.checksum.nbytes,
            "sum": f"{self.checksum.sum:064x}",
            "skipped": self.skipped,
            "file_nbytes": self.file_nbytes,
            "crc32": self.crc32,
        }

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> WrittenSegment:
        """Return the segment of a journal's entry."""
        return cls(
            number=entry["number"],
            checksum=DatasetChecksum(entry["samples"], entry["nbytes"], int(entry["sum"], 16)),
            skipped=entry["skipped"],
            file_nbytes=entry["file_nbytes"],
            crc32=entry["crc32"],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteTask:
    """Writes a segment: some records, in a file."""

    action: ClassVar[str] = "writing segment"

    number: int
    spec: SourceSpec
    ranges: tuple[RecordRange, ...]
    errors: Errors
    schema: Schema
    format: str
    options: dict[str, Any]
    folder: str
    suffix: str

    def run(self, context: TaskContext) -> WrittenSegment:
        """Write the file, and return its checksums."""
        checksum, skipped = DatasetChecksum(), 0
        with atomic_folder(self.folder) as temporary:
            writer = _writer(self.format, data_path(temporary, self.suffix), self.schema, self.options)
            for record in self._records(context):
                if isinstance(record, RecordError):
                    skipped += 1
                    continue
                before = checksum.nbytes
                checksum.add(record)
                writer.write(record)
                context.count(1, checksum.nbytes - before)
            writer.close()
        return WrittenSegment(
            number=self.number,
            checksum=checksum,
            skipped=skipped,
            file_nbytes=nbytes_of(self.folder),
            crc32=crc32_of(self.folder),
        )

    def _records(self, context: TaskContext) -> Iterator[Sample | RecordError]:
        reader = context.reader(self.spec)
        for one in self.ranges:
            count, expected = 0, len(range(one.first, one.stop or 0))
            try:
                for record in reader.records(one):
                    if isinstance(record, RecordError) and self.errors == "raise":
                        raise record
                    count += 1
                    yield record
            except RecordError as error:
                if self.errors == "raise":
                    raise
                yield from [error] * (expected - count)
                count = expected
            if count != expected:
                raise SourceError(
                    f"{reader.source.where} has changed while it was read: it had {expected} records, and now {count}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckSegmentTask:
    """Reads a segment of an earlier attempt, to check that it is what the journal recorded."""

    action: ClassVar[str] = "checking segment"

    number: int
    folder: str
    file_nbytes: int
    crc32: int

    def run(self, context: TaskContext) -> bool:
        """Return whether the segment is unchanged."""
        if not os.path.exists(self.folder) or nbytes_of(self.folder) != self.file_nbytes:
            return False
        return crc32_of(self.folder) == self.crc32


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinTask:
    """Joins several segments to one file."""

    action: ClassVar[str] = "joining file"

    number: int
    format: str
    parts: tuple[str, ...]
    """The segments' folders."""
    folder: str
    suffix: str

    def run(self, context: TaskContext) -> int:
        """Write the file, and return its size."""
        parts = [data_path(part, self.suffix) for part in self.parts]
        with atomic_folder(self.folder) as temporary:
            concat_files = format_named(self.format).concat_files
            assert concat_files is not None
            concat_files(parts, data_path(temporary, self.suffix))
        return nbytes_of(self.folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class CountTask:
    """Checks that a file has as many samples as were written to it."""

    action: ClassVar[str] = "counting samples of file"

    number: int
    path: str
    format: str
    options: dict[str, Any]
    expected: int

    def run(self, context: TaskContext) -> None:
        """Open the file and count.

        Raises:
            SourceError: it has more or fewer.
        """
        reader = RecordReader(SourceSpec.create((self.path,), format=self.format, options=self.options))
        try:
            counts = known_counts(reader.source)
            if counts is not None:
                found = counts.total
            else:  # skipping samples is cheaper than making them
                last = max(0, self.expected - 1)
                found = last + sum(1 for _ in islice(reader.records(RecordRange(0, last, None)), 2))
        finally:
            reader.close()
        if found != self.expected:
            raise SourceError(f"{self.path} holds {found} samples; {self.expected} were written to it")


def data_path(folder: str, suffix: str) -> str:
    """Return the path of the file that a format writes in a segment's folder."""
    return os.path.join(folder, f"data{suffix}")


@contextmanager
def atomic_folder(path: str) -> Iterator[str]:
    """Yield a new folder to write in, which is synced and renamed to `path` at the end, or removed after an error."""
    parent, name = os.path.split(path)
    temporary = os.path.join(parent, f"new-{os.getpid()}-{name}")
    _remove(temporary)
    os.mkdir(temporary)
    try:
        yield temporary
        sync_file(temporary)
        _remove(path)
        os.rename(temporary, path)
        sync_folder(parent)
    except BaseException:
        _remove(temporary)
        raise


def _remove(folder: str) -> None:
    if os.path.lexists(folder):
        shutil.rmtree(folder)


def _writer(format: str, path: str, schema: Schema, options: dict[str, Any]) -> Writer:
    open_writer = format_named(format).writer
    assert open_writer is not None
    return open_writer(path, schema, **options)
