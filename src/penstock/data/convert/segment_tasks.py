"""What tasks do with segments: write one, join several to a file of the result, read one there again.

Each segment lies in a folder, as "data" with the suffix of the target. Some formats write several files; the names of
the others begin with "data", too. A task that finds its folder, complete and with unchanged bytes, leaves it as it is.
"""

from __future__ import annotations

import json
import os
import zlib
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from penstock.core.errors import RecordError, SourceError
from penstock.data.convert.canonical_bytes import DatasetChecksum
from penstock.data.convert.numbered_records import RecordRange, RecordReader, SourceSpec, known_counts
from penstock.data.convert.partial_folder import atomic_folder, read_json
from penstock.data.convert.target import RECORD_NAME, Target, files_of, nbytes_of
from penstock.data.convert.task import TaskContext
from penstock.data.schema import Errors, Schema

_READ_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Written:
    """What a complete folder holds, as written.json in it says."""

    checksum: DatasetChecksum
    skipped: int
    file_nbytes: int
    crc32: int

    @classmethod
    def record(cls, folder: str, checksum: DatasetChecksum, skipped: int) -> Written:
        """Return and record what was written to a folder."""
        written = cls(checksum, skipped, nbytes_of(folder), crc32_of(folder))
        with open(os.path.join(folder, RECORD_NAME), "w", encoding="utf-8") as file:
            json.dump(asdict(written), file)
        return written

    @classmethod
    def load(cls, folder: str) -> Written | None:
        """Return what a folder's record says; None if there is no such folder."""
        entry = read_json(os.path.join(folder, RECORD_NAME))
        return entry and cls(**{**entry, "checksum": DatasetChecksum(**entry["checksum"])})

    @classmethod
    def load_intact(cls, folder: str) -> Written | None:
        """Return what a folder's record says; None if its files have changed, or there is no such folder."""
        written = cls.load(folder)
        return written if written is not None and crc32_of(folder) == written.crc32 else None


def write_segment(
    context: TaskContext,
    *,
    spec: SourceSpec,
    ranges: tuple[RecordRange, ...],
    errors: Errors,
    schema: Schema,
    target: Target,
    options: dict[str, Any],
    folder: str,
) -> tuple[Written, bool]:
    """Write some records to the file of a segment; return what it holds, and whether an earlier attempt wrote it."""
    earlier = Written.load_intact(folder)
    if earlier is not None:
        context.count(earlier.checksum.samples, 0)
        return earlier, True
    checksum, skipped = DatasetChecksum(), 0
    open_writer = target.kind.writer
    assert open_writer is not None
    with atomic_folder(folder) as temporary:
        writer = open_writer(target.data_path(temporary), schema, **options)
        for record in context.reader(spec).read_ranges(ranges, errors):
            if isinstance(record, RecordError):
                skipped += 1
                continue
            nbytes = checksum.add(record)
            writer.write(record)
            context.count(1, nbytes)
        writer.close()
        written = Written.record(temporary, checksum, skipped)
    return written, False


def join_segments(
    context: TaskContext,
    *,
    target: Target,
    folders: list[str],
    folder: str,
    checksum: DatasetChecksum,
    options: dict[str, Any],
) -> str:
    """Join the files of several segments to one that holds the samples of `checksum`; return its folder."""
    if len(folders) == 1:
        folder = folders[0]
    else:
        earlier = Written.load_intact(folder)
        if earlier is None or earlier.checksum != checksum:
            concat_files = target.kind.concat_files
            assert concat_files is not None
            with atomic_folder(folder) as temporary:
                concat_files([target.data_path(one) for one in folders], target.data_path(temporary))
                Written.record(temporary, checksum, 0)
    _check_count(SourceSpec([target.data_path(folder)], target.kind.name, None, options), checksum)
    return folder


def read_checksum(context: TaskContext, *, spec: SourceSpec, ranges: tuple[RecordRange, ...]) -> DatasetChecksum:
    """Return the checksum of some samples."""
    checksum = DatasetChecksum()
    for record in context.reader(spec).read_ranges(ranges, "raise"):
        assert not isinstance(record, RecordError)
        context.count(1, checksum.add(record))
    return checksum


def _check_count(spec: SourceSpec, checksum: DatasetChecksum) -> None:
    """Check that a file has as many samples as were written to it."""
    with closing(RecordReader(spec)) as reader:
        counts = known_counts(reader.source)
        if counts is not None:
            found = sum(counts)
        else:  # skipping samples is cheaper than making them
            last = max(0, checksum.samples - 1)
            found = last + sum(1 for _ in islice(reader.records(RecordRange(0, last, None)), 2))
    if found != checksum.samples:
        raise SourceError(f"{spec.path[0]} holds {found} samples; {checksum.samples} were written to it")


def crc32_of(folder: str) -> int:
    """Return the CRC-32 of the names and bytes of a folder's files, except its record."""
    crc = 0
    for name in files_of(folder):
        relative = os.path.relpath(name, folder)
        if relative == RECORD_NAME:
            continue
        crc = zlib.crc32(relative.encode(), crc)
        with open(name, "rb") as file:
            while data := file.read(_READ_NBYTES):
                crc = zlib.crc32(data, crc)
    return crc
