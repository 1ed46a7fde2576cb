"""LMDB databases: a sample for each key.

    key "0000000000", "0000000001", ...    as `LMDBWriter` writes them: a value is "PSK" and a byte 1, the CRC-32 of
                                           what follows (uint32), and a tf.train.Example (tfrecord/features.py)
    any other                              the sample is {"key": bytes, "value": bytes}; `.map` decodes it

Samples are in the order of their keys; shorter keys come first, so that 2 comes before 10. Entries that describe the
others (a length, a list of keys) are left out; see bookkeeping.py. No value is ever unpickled.

Keys that are no numbers are listed when the first sample is read; see keys.py. A batch is read in one transaction; a
pass in order follows a cursor. Nobody may write a file while it is read.

LMDB's C code trusts a file, and a damaged one may bring the process down. What environment.py checks on opening finds
files that are cut off. The rest is for `check=True`, or for the loader, whose workers may die: it names the sample.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.core.errors import RecordError, SourceError
from penstock.core.per_process import PerProcess
from penstock.data.formats.lmdb.bookkeeping import bookkeeping_keys
from penstock.data.formats.lmdb.environment import Environment, find_problem, open_environment
from penstock.data.formats.lmdb.keys import Keys, check_values, list_keys, numbered_keys
from penstock.data.formats.tfrecord.features import SchemaEncoder
from penstock.data.formats.tfrecord.source import RecordParser
from penstock.data.optional import need
from penstock.data.rows import ConcatIndex
from penstock.data.sample_batch import put_in_order, samples_of
from penstock.data.schema import Errors, Sample, Schema, Selection
from penstock.data.source import Source
from penstock.data.storage.storage import Storage

_MAGIC = b"PSK\x01"
_PREFIX = struct.Struct("<4sI")
_COMMIT_NBYTES = 16 << 20
_BLOCK = 1 << 14
"""Samples that a pass in order reads in one transaction."""


def open_files(
    paths: list[str],
    storage: Storage,
    fields: Selection,
    errors: Errors,
    *,
    database: str | None = None,
    check: bool = False,
    max_record_nbytes: int = 1 << 30,
) -> LMDBSource:
    """Open databases, one after another, as a source.

    Args:
        paths: files, or folders with a data.mdb.
        storage: where they lie.
        fields: which fields samples have.
        errors: unused: reading a broken sample raises RecordError.
        database: the name of a database inside the files; None for the files' own.
        check: read all pages of the files first, without LMDB's C code, which a damaged file may crash: for files of
            unknown origin, at some 50 MB/s. Keys are then listed, also where they seem to be numbers without gaps.
        max_record_nbytes: the most bytes that a value may have.

    Raises:
        SourceError: one is not there, is truncated, or with `check` damaged anywhere.
        ExtraError: the lmdb package is not installed.
    """
    files = [_File(_data_file(path, storage), database, check=check) for path in paths]
    return LMDBSource(files, paths[0] if len(paths) == 1 else f"{paths[0]} and others", fields, max_record_nbytes)


class _File:
    """A database of a file."""

    def __init__(self, path: str, database: str | None, *, check: bool = False) -> None:
        self.path = os.path.abspath(path)
        self.database = database
        problem = find_problem(self.path) if check else ""
        if problem:
            raise SourceError(f"{path} is damaged: {problem}")
        self.environment: PerProcess[Environment] = PerProcess(partial(open_environment, self.path))
        environment = self.environment.get()
        self.nbytes = environment.nbytes
        with environment.reading(database, buffers=True) as reading:
            self.count = int(reading.stat(environment.database(database))["entries"])
            if self.count > self.nbytes:
                raise SourceError(f"{path} states {self.count} entries, which need more bytes than it has")
            cursor = reading.cursor()
            check_values(environment, [cursor.item()] if cursor.first() else [])
            self.is_packed = bytes(cursor.value()[: len(_MAGIC)]) == _MAGIC
            flags = environment.database(database).flags()
            self._without = bookkeeping_keys(cursor, self.count, reverse_key=flags["reverse_key"])
            self.count -= len(self._without)
            self._keys: Keys | None = None if check else numbered_keys(cursor, self.count, self._without)

    def keys(self) -> Keys:
        """Return its keys.

        Raises:
            SourceError: the file is damaged, or holds databases.
        """
        if self._keys is None:  # two threads may both list them: a lock would have to cross forks
            self._keys = list_keys(self.environment.get(), self.database, self._without)
        return self._keys

    def can_follow_cursor(self, most: int) -> bool:
        """Return whether a cursor meets its samples in their order, none of which has to be looked at."""
        return not self.count or (self.nbytes <= most and self.keys().is_in_order and not self.is_packed)

    def values(self, numbers: list[int], most: int) -> tuple[list[bytes], list[bytes]]:
        """Return the keys of some samples and their values, read in one transaction.

        Raises:
            RecordError: a value is not there, or has more than `most` bytes.
        """
        keys = self.keys().take(numbers)
        copies = self.nbytes <= most
        with self.environment.get().reading(self.database, buffers=not copies, keys=keys) as reading:
            values = list(map(reading.get, keys))
            if not all(values) and None in values:
                reason = "it is missing, and there are as many keys as numbers; check=True lists those that are there"
                raise RecordError(self.path, -1, keys[values.index(None)], reason)
            if not copies:
                for key, value in zip(keys, values, strict=True):
                    if len(value) > most:
                        reason = f"{len(value)} bytes are more than max_record_nbytes={most}"
                        raise RecordError(self.path, -1, key, reason)
                values = list(map(bytes, values))
            return keys, values


class LMDBSource(Source):
    """The entries of LMDB files; see the module."""

    reads_batches = True

    def __init__(self, files: Sequence[_File], where: str, fields: Selection, max_record_nbytes: int) -> None:
        self.where = where
        self._files = tuple(files)
        self._fields = fields
        self._parse = RecordParser(fields=fields, most=max_record_nbytes)
        self._most = max_record_nbytes
        self._parts = ConcatIndex(file.count for file in files)

    def __len__(self) -> int:
        return len(self._parts)

    def begin_epoch(self, number: int) -> int | None:
        """List the keys, so that the workers do not have to."""
        for file in self._files:
            file.keys()
        return super().begin_epoch(number)

    def read(self, index: int) -> Sample:
        """Return a sample; its arrays are its own, and may be written to."""
        number, own = self._parts.locate(index)
        return self._read_file(self._files[number], [own])[0]

    def read_many(self, indices: np.ndarray) -> list[Sample]:
        """Return samples, those of a file read in one transaction."""
        parts = self._parts.split(indices)
        return put_in_order(
            [(at, self._read_file(self._files[number], own.tolist())) for number, at, own in parts], len(indices)
        )

    def _read_file(self, file: _File, numbers: list[int]) -> list[Sample]:
        keys, values = file.values(numbers, self._most)
        if file.is_packed:
            return [self._unpacked(file, key, value) for key, value in zip(keys, values, strict=True)]
        columns = {"key": keys, "value": values}
        if self._fields.chosen is None:
            return samples_of([*columns], [*columns.values()])
        names = self._fields.names(columns, self.where)
        return samples_of([*names], [columns[own] for own in names.values()])

    def _unpacked(self, file: _File, key: bytes, value: bytes) -> Sample:
        try:
            record = value[_PREFIX.size :]
            if value[: _PREFIX.size] != _PREFIX.pack(_MAGIC, zlib.crc32(record)):
                raise SourceError("its CRC-32 does not match")
            return self._parse.sample(record)
        except ValueError as error:
            raise RecordError(file.path, -1, key, str(error)) from error

    def _read_batch(self, indices: Sequence[int]) -> list[Sample]:
        with contextlib.suppress(SourceError, TypeError, ValueError):  # raised again below, if it is an error
            # A sum has the widest type of what is in it.
            if len(self._files) == 1 and type(sum(indices)) is int and min(indices) >= 0 and max(indices) < len(self):
                return self._read_file(self._files[0], [*indices])
        return super()._read_batch(indices)

    def ready(self, indices: np.ndarray) -> np.ndarray:
        """Return none: LMDB may crash on each."""
        return indices[:0]

    def __iter__(self) -> Iterator[Sample]:
        """Yield all samples, in order; see `Source`."""
        if self._fields.chosen is not None or not all(file.can_follow_cursor(self._most) for file in self._files):
            yield from super().__iter__()
            return
        start, self._start = self._start, 0
        while start < len(self):
            number, own = self._parts.locate(start)
            file, end = self._files[number], self._parts.starts[number + 1]
            block = range(start, min(start + _BLOCK, end))
            key, (first, last) = b"", file.keys().take([own, own + len(block) - 1])
            self._stop, self._left = block.stop, itertools.repeat(None, len(block))
            with file.environment.get().reading(file.database) as reading:
                cursor = reading.cursor()
                cursor.set_key(first)
                for _, (key, value) in zip(self._left, cursor, strict=False):
                    yield {"key": key, "value": value}
            if key != last:
                raise SourceError(f"{file.path}: {key!r} is its sample {own + len(block) - 1}, and not {last!r}")
            start = block.stop
        self._stop = 0

    def read_paths(self) -> Sequence[str]:
        """Return the files that samples are read from."""
        return [file.path for file in self._files]

    def path_of(self, index: Any) -> str:
        """Return the file that a sample is read from."""
        return self._files[self._parts.locate(index)[0]].path

    def close(self) -> None:
        """Close this process's files."""
        for file in self._files:
            file.environment.close()


def _data_file(path: str, storage: Storage) -> str:
    local = storage.local(path)
    return storage.local(os.path.join(local, "data.mdb")) if os.path.isdir(local) else local


class LMDBWriter:
    """Writes samples to a new database, under the keys "0000000000", "0000000001", ...

    Args:
        path: a file where it ends in .lmdb or .mdb, else a folder.
        schema: of the samples.
        commit_nbytes: written in one transaction.

    Raises:
        SourceError: the path exists, or samples of this schema cannot be written.
    """

    def __init__(self, path: str, schema: Schema, *, commit_nbytes: int = _COMMIT_NBYTES) -> None:
        self._encoder = SchemaEncoder(schema)
        self._lmdb = need("lmdb", "lmdb")
        if os.path.exists(path):
            raise SourceError(f"{path} exists; a new database needs another path")
        self._path = path
        self._commit_nbytes = commit_nbytes
        self._count = 0
        self._waiting: list[bytes] = []
        self._waiting_nbytes = 0
        with self._translate_errors():
            self._environment = self._lmdb.open(
                path, subdir=not path.endswith((".lmdb", ".mdb")), map_size=4 * commit_nbytes, lock=False, sync=False
            )

    def write(self, sample: Sample) -> None:
        """Add a sample."""
        record = self._encoder.example(sample)
        self.add(_PREFIX.pack(_MAGIC, zlib.crc32(record)) + record)

    def add(self, value: bytes) -> None:
        """Add a value as another database of this class has it."""
        self._waiting.append(value)
        self._waiting_nbytes += len(value)
        if self._waiting_nbytes >= self._commit_nbytes:
            self._commit()

    def close(self) -> None:
        """Finish the file."""
        try:
            self._commit()
            with self._translate_errors():
                self._environment.sync(True)
        finally:
            self._environment.close()

    def _commit(self) -> None:
        with self._translate_errors():
            while True:
                try:
                    with self._environment.begin(write=True) as transaction:
                        for number, value in enumerate(self._waiting, self._count):
                            transaction.put(b"%010d" % number, value, append=True)
                    break
                except self._lmdb.MapFullError:
                    size = self._environment.info()["map_size"]
                    self._environment.set_mapsize(2 * size + self._waiting_nbytes)
        self._count += len(self._waiting)
        self._waiting.clear()
        self._waiting_nbytes = 0

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except self._lmdb.Error as error:
            raise SourceError(f"{self._path} cannot be written: {error}") from error


def concat_files(parts: Sequence[str], path: str) -> None:
    """Make one database of several that `LMDBWriter` made, in their order: values are copied as they are.

    Raises:
        SourceError: one cannot be read, or `path` cannot be written.
    """
    database = LMDBWriter(path, {})
    try:
        for part in parts:
            file = _File(_data_file(part, Storage()), None)
            for number in range(file.count):
                database.add(file.values([number], 1 << 40)[1][0])
    finally:
        database.close()
