"""Writing a segment of a conversion, proving that it is there, joining several, and counting what came of it.

Each lies in a folder of its own, as "data" and the target's suffix, since some formats write more files than one: those
have names that begin with "data", too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from penstock.core.errors import RecordError, SourceError
from penstock.feed.convert.canon import Tally
from penstock.feed.convert.journal import crc32_of
from penstock.feed.convert.reading import Reader, Recipe, Stretch, known_layout
from penstock.feed.convert.target import nbytes_of, sync_file, sync_folder
from penstock.feed.convert.tasks import Bench
from penstock.feed.sources.formats import named
from penstock.feed.sources.sample import Errors, Sample, Schema


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrote:
    """A file that lies complete on the disk."""

    number: int
    tally: Tally
    skipped: int
    file_nbytes: int
    crc32: int

    def to_json(self) -> dict[str, Any]:
        """Return it for the journal."""
        return {
            "number": self.number,
            "samples": self.tally.samples,
            "nbytes": self.tally.nbytes,
            "sum": f"{self.tally.sum:064x}",
            "skipped": self.skipped,
            "file_nbytes": self.file_nbytes,
            "crc32": self.crc32,
        }

    @classmethod
    def of_json(cls, entry: dict[str, Any]) -> Wrote:
        """Return what a journal says."""
        return cls(
            number=entry["number"],
            tally=Tally(entry["samples"], entry["nbytes"], int(entry["sum"], 16)),
            skipped=entry["skipped"],
            file_nbytes=entry["file_nbytes"],
            crc32=entry["crc32"],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """Write a segment: some records, in a file of their own."""

    number: int
    recipe: Recipe
    stretches: tuple[Stretch, ...]
    errors: Errors
    schema: Schema
    format: str
    options: dict[str, Any]
    folder: str
    suffix: str

    def run(self, bench: Bench) -> Wrote:
        """Write the file, and return what is in it."""
        tally, skipped = Tally(), 0
        with whole_folder(self.folder) as temporary:
            writer = _writer(self.format, data_path(temporary, self.suffix), self.schema, self.options)
            for record in self._records(bench):
                if isinstance(record, RecordError):
                    skipped += 1
                    continue
                before = tally.nbytes
                tally.add(record)
                writer.write(record)
                bench.count(1, tally.nbytes - before)
            writer.close()
        return Wrote(
            number=self.number,
            tally=tally,
            skipped=skipped,
            file_nbytes=nbytes_of(self.folder),
            crc32=crc32_of(self.folder),
        )

    def _records(self, bench: Bench) -> Iterator[Sample | RecordError]:
        reader = bench.reader(self.recipe)
        for stretch in self.stretches:
            count, expected = 0, len(range(stretch.first, stretch.stop or 0))
            try:
                for record in reader.records(stretch):
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
                    f"{reader.source.where} has changed while it was read: {expected} records were there, now {count}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prove:
    """Read a segment of an earlier attempt again, to see that it is what the journal says."""

    number: int
    folder: str
    file_nbytes: int
    crc32: int

    def run(self, bench: Bench) -> bool:
        """Say whether it is."""
        if not os.path.exists(self.folder) or nbytes_of(self.folder) != self.file_nbytes:
            return False
        return crc32_of(self.folder) == self.crc32


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """Make one file of several segments."""

    number: int
    format: str
    parts: tuple[str, ...]
    """The segments' folders."""
    folder: str
    suffix: str

    def run(self, bench: Bench) -> int:
        """Make the file, and return its size."""
        parts = [data_path(part, self.suffix) for part in self.parts]
        with whole_folder(self.folder) as temporary:
            named(self.format).load().joined(parts, data_path(temporary, self.suffix))
        return nbytes_of(self.folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """See that a file has as many samples as were written to it."""

    number: int
    path: str
    format: str
    options: dict[str, Any]
    expected: int

    def run(self, bench: Bench) -> None:
        """Open it and count.

        Raises:
            SourceError: there are more or fewer.
        """
        reader = Reader(Recipe.of((self.path,), format=self.format, options=self.options))
        try:
            layout = known_layout(reader.source)
            if layout is not None:
                found = layout.total
            else:  # what is not the last sample is skipped, which is cheap
                last = max(0, self.expected - 1)
                found = last + sum(1 for _ in islice(reader.records(Stretch(0, last, None)), 2))
        finally:
            reader.close()
        if found != self.expected:
            raise SourceError(f"{self.path} holds {found} samples; {self.expected} were written to it")


def data_path(folder: str, suffix: str) -> str:
    """Return the file that a format writes in a segment's folder."""
    return os.path.join(folder, f"data{suffix}")


@contextmanager
def whole_folder(path: str) -> Iterator[str]:
    """Give a new folder to write in; then sync it and rename it to `path`. After an error it is removed."""
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


def _writer(format: str, path: str, schema: Schema, options: dict[str, Any]) -> Any:
    return named(format).load().Writer(path, schema, **options)
