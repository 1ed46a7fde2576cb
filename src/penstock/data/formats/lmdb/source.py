"""LMDB databases: a sample for each key.

    key "0000000000", "0000000001", ...    as `LMDBWriter` writes them: a value is "PSK" and a byte 1, the CRC-32 of
                                           what follows (uint32), and a tf.train.Example (tfrecord/features.py)
    any other                              the sample is {"key": bytes, "value": bytes}; `.map` decodes it

Samples are in the order of their keys; shorter keys come first, so that 2 comes before 10. Entries that describe the
others are left out: __len__, __length__, __keys__, __meta__, num-samples; and where the first key begins with a digit,
len, length, keys and meta. No value is ever unpickled.

Keys that are numbers without gaps, 0, 1, 2, ... or 0000, 0001, 0002, ..., are recognised by a few of them and their
count. Others are listed once, when the first sample is read, or by our loader before its workers start: the lmdb
package touches every page of the file for that. A batch is read in one transaction. Nobody may write a file while it is
read.

LMDB's C code trusts a file, and a damaged one may bring the process down. What environment.py checks on opening finds
files that are cut off. The rest is for `check=True`, or for the loader, whose workers may die: it names the sample.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import zlib
from collections.abc import Iterator, Sequence, Set
from functools import partial
from typing import Any

import numpy as np

from penstock.core.errors import RecordError, SourceError
from penstock.core.per_process import PerProcess
from penstock.data.formats.lmdb.environment import Environment, find_problem, open_environment
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
_NAMES = (b"__len__", b"__length__", b"__keys__", b"__meta__", b"num-samples")
_WORDS = (b"len", b"length", b"keys", b"meta")
"""Of entries that describe the others; a vocabulary has such words, too."""
_DATABASE_NBYTES = 48
"""What an entry holds that is a database."""
_STEPS = [1 << power for power in range(8)]
"""How far from the last of unpadded numbers keys are looked up, on both sides: as many as are missing are above it."""


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


class _Keys:
    """Keys in two objects, however many they are: forked workers share their memory."""

    def __init__(self, keys: list[bytes]) -> None:
        self._data = b"".join(keys)
        self._ends = np.cumsum([0, *map(len, keys)])
        width = len(keys[0]) if keys else 1
        self._rows = np.frombuffer(self._data, f"V{width}") if {*map(len, keys)} == {width} else None

    def take(self, numbers: Sequence[int]) -> list[bytes]:
        if self._rows is not None:
            return self._rows[numbers].tolist()  # type: ignore[no-any-return]
        begins, ends = self._ends[numbers].tolist(), self._ends[np.array(numbers, np.int64) + 1].tolist()
        return [self._data[begin:end] for begin, end in zip(begins, ends, strict=True)]


class _Numbers:
    """Keys 0, 1, 2, ... with zeros before them up to a width."""

    def __init__(self, width: int) -> None:
        self._format = b"%%0%dd" % width

    def take(self, numbers: Sequence[int]) -> list[bytes]:
        form = self._format
        return [form % number for number in numbers]


def _numbers(cursor: Any, count: int, without: Set[bytes]) -> _Numbers | None:
    """Return the keys that `count` entries have if they are numbers without gaps, as far as a few of them tell."""
    if not count or not cursor.first() or bytes(cursor.key()).strip(b"0"):
        return None
    width = len(cursor.key())
    keys = _Numbers(width)
    (last,) = keys.take([count - 1])
    end = last if width > 1 else max(last, b"9" * (len(last) - 1))  # of 0 to 120 the last is 99
    if len(last) > width > 1 or not cursor.set_key(end) or (cursor.next() and bytes(cursor.key()) not in without):
        return None
    if width == 1:
        below = keys.take([count - step for step in _STEPS if step <= count])
        above = keys.take([count - 1 + step for step in _STEPS])
        return keys if all(map(cursor.set_key, below)) and not any(map(cursor.set_key, above)) else None
    return keys


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
            entries = int(reading.stat(environment.database(database))["entries"])
            if entries > self.nbytes:
                raise SourceError(f"{path} states {entries} entries, which need more bytes than it has")
            cursor = reading.cursor()
            first = cursor.first()
            self._refuse_databases([cursor.item()] if first else [])
            self.is_packed = bytes(cursor.value()[: len(_MAGIC)]) == _MAGIC
            names = _NAMES + _WORDS if bytes(cursor.key())[:1].isdigit() else _NAMES
            self._without = frozenset(key for key in names if cursor.set_key(key))
            self.count = entries - len(self._without)
            numbers = None if check else _numbers(cursor, self.count, self._without)
        self._keys: _Keys | _Numbers | None = numbers
        self.is_in_order = numbers is not None and len(numbers.take([0])[0]) > 1
        """Whether a cursor meets the samples in their order, and nothing between, once keys are listed."""

    def keys(self) -> _Keys | _Numbers:
        """Return its keys.

        Raises:
            SourceError: the file is damaged, or holds databases.
        """
        if self._keys is None:  # two threads may both list them: a lock would have to cross forks
            environment, keys, found = self.environment.get(), list[bytes](), 0
            with environment.reading(self.database, buffers=True) as reading:
                entries = itertools.islice(reading.cursor(), self.count + len(self._without) + 1)
                for found, (key, value) in enumerate(entries, 1):  # noqa: B007  pages may lie in a circle: not all
                    if len(value) == _DATABASE_NBYTES:
                        self._refuse_databases([(key, value)])
                    if (own := bytes(key)) not in self._without:
                        keys.append(own)
            if len(keys) != self.count or not all(keys):
                raise SourceError(f"{self.path}: it states {self.count} samples, and has {len(keys)}; it is corrupt")
            ordered = sorted(keys, key=len)
            self.is_in_order = found == len(keys) and ordered == keys
            self._keys = _Keys(ordered)
        return self._keys

    def _refuse_databases(self, entries: list[tuple[Any, Any]]) -> None:
        """Raise SourceError if an entry is not a value but a database."""
        maybe = [bytes(key) for key, value in entries if len(value) == _DATABASE_NBYTES]
        if names := self.environment.get().database_names(maybe) if maybe else None:
            raise SourceError(f"{self.path}: it holds databases ({', '.join(names)[:200]}); pass database=")

    def can_follow_cursor(self, most: int) -> bool:
        """Return whether a cursor meets its samples in their order, none of which has to be looked at."""
        if self.is_packed or self.nbytes > most:
            return not self.count
        self.keys()
        return self.is_in_order

    def values(self, numbers: Sequence[int], most: int) -> tuple[list[bytes], list[bytes]]:
        """Return the keys of some samples and their values, read in one transaction.

        Raises:
            RecordError: a value is not there, or has more than `most` bytes.
        """
        keys, copies = self.keys().take(numbers), self.nbytes <= most
        with self.environment.get().reading(self.database, buffers=not copies, key=keys[0] if keys else b"") as reading:
            values = list(map(reading.get, keys))
            for key, value in zip(keys, values, strict=True) if not copies or not all(values) else ():
                if value is None or len(value) > most:
                    reason = "it is missing, though keys seem to be all numbers; check=True lists those that are there"
                    if value:
                        reason = f"{len(value)} bytes are more than max_record_nbytes={most}"
                    raise RecordError(self.path, -1, key, reason)
            return keys, values if copies else list(map(bytes, values))


class LMDBSource(Source):
    """The entries of LMDB files; see the module."""

    reads_batches = True

    def __init__(self, files: Sequence[_File], where: str, fields: Selection, max_record_nbytes: int) -> None:
        self.where = where
        self._files = tuple(files)
        self._paths = [file.path for file in files]
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
        return self._samples(self._files[number], [own])[0]

    def read_many(self, indices: np.ndarray) -> list[Sample]:
        """Return samples, those of a file read in one transaction."""
        parts = self._parts.split(indices)
        found = [(at, self._samples(self._files[number], own.tolist())) for number, at, own in parts]
        return put_in_order(found, len(indices))

    def __iter__(self) -> Iterator[Sample]:
        """Yield all samples, in order; by a cursor where it meets them so, and none has to be looked at."""
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

    def _read_batch(self, indices: Sequence[int]) -> list[Sample]:
        with contextlib.suppress(SourceError, TypeError, ValueError):  # raised again below, if it is an error
            # A sum has the widest type of what is in it.
            if len(self._files) == 1 and type(sum(indices)) is int and min(indices) >= 0 and max(indices) < len(self):
                return self._samples(self._files[0], [*indices])
        return super()._read_batch(indices)

    def _samples(self, file: _File, numbers: Sequence[int]) -> list[Sample]:
        keys, values = file.values(numbers, self._most)
        if file.is_packed:
            return [self._unpacked(file, key, value) for key, value in zip(keys, values, strict=True)]
        names = {"key": "key", "value": "value"}
        if self._fields.chosen is not None:
            names = self._fields.names(names, self.where)
        return samples_of([*names], [keys if own == "key" else values for own in names.values()])

    def _unpacked(self, file: _File, key: bytes, value: bytes) -> Sample:
        try:
            record = value[_PREFIX.size :]
            if value[: _PREFIX.size] != _PREFIX.pack(_MAGIC, zlib.crc32(record)):
                raise SourceError("its CRC-32 does not match")
            return self._parse.sample(record)
        except ValueError as error:
            raise RecordError(file.path, -1, key, str(error)) from error

    def ready(self, indices: np.ndarray) -> np.ndarray:
        """Return none: LMDB may crash on each."""
        return indices[:0]

    def path_of(self, index: Any) -> str:
        """Return the file that a sample is read from."""
        return self._paths[self._parts.locate(index)[0]]

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
        value = _PREFIX.pack(_MAGIC, zlib.crc32(record)) + record
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
