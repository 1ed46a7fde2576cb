"""LMDB databases: a sample for each key.

    key "0000000000", "0000000001", ...    as `LMDBWriter` writes them; values are packed samples (sample_codec.py)
    any other                              the sample is {"key": bytes, "value": bytes}; `.map` decodes it

Samples are in the order of their keys; shorter keys come first, so that 2 comes before 10. Entries that describe the
others (`NOT_SAMPLES`: a length, a list of keys) are left out. No value is ever unpickled.

Files are read without LMDB's C library, which trusts every page number that it finds and is brought down by a damaged
file. The tree is walked once (see btree.py): when a file is opened if it is small, else when its first sample is read.
A sample is then one read of a file, by any thread of any process. As without a lock in LMDB, nobody may write a file
while it is read. Only `LMDBWriter` needs the package.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from functools import partial

import numpy as np

from penstock.core.errors import RecordError, SourceError
from penstock.core.per_process import PerProcess
from penstock.data.concat_index import ConcatIndex
from penstock.data.formats.lmdb.btree import OVERFLOW, PAGE, KeyTree
from penstock.data.formats.lmdb.sample_codec import MAGIC, pack, unpack, why_unsupported
from penstock.data.optional import need
from penstock.data.sample_batch import put_in_order, samples_of
from penstock.data.schema import Errors, Sample, Schema, Selection, fitted
from penstock.data.source import Source
from penstock.data.storage.storage import Storage

NOT_SAMPLES = frozenset(
    {b"__len__", b"__length__", b"__keys__", b"__meta__", b"len", b"length", b"keys", b"meta", b"num-samples"}
)
"""Keys of entries that describe the others."""

_COMMIT_NBYTES = 16 << 20
_SMALL_NBYTES = 1 << 20
"""A value up to this is read without asking first whether the file has it."""


def open_files(
    paths: list[str],
    storage: Storage,
    fields: Selection,
    errors: Errors,
    *,
    database: str | None = None,
    max_record_nbytes: int = 1 << 30,
) -> LMDBSource:
    """Open databases, one after another, as a source.

    Args:
        paths: files, or folders with a data.mdb.
        storage: where they lie.
        fields: which fields samples have.
        errors: unused: reading a broken sample raises RecordError.
        database: the name of a database inside the files; None for the files' own.
        max_record_nbytes: the most bytes that a value may have.

    Raises:
        SourceError: one is not there, or is damaged where its keys are. Of a large one, reading raises the latter.
    """
    files = [KeyTree(_data_file(path, storage), database, NOT_SAMPLES) for path in paths]
    return LMDBSource(files, paths[0] if len(paths) == 1 else f"{paths[0]} and others", fields, max_record_nbytes)


class LMDBSource(Source):
    """The entries of LMDB files; see the module."""

    reads_batches = True

    def __init__(self, files: Sequence[KeyTree], where: str, fields: Selection, max_record_nbytes: int) -> None:
        self.where = where
        self._files = tuple(files)
        self._fields = fields
        self._max_record_nbytes = max_record_nbytes
        self._parts = ConcatIndex(file.count for file in files)
        self._descriptors = [PerProcess(partial(_open, one.path), os.close) for one in files]
        self._packed: dict[int, bool] = {}
        """By file, as far as they were read: whether samples are `sample_codec`'s."""

    def __len__(self) -> int:
        return len(self._parts)

    def read(self, index: int) -> Sample:
        """Return a sample; its arrays are its own, and may be written to."""
        file, number = self._parts.locate(index)
        value = self._value(file, number)
        if not self._is_packed(file):
            key = self._files[file].index().key(number)
            return self._fields.take({"key": key, "value": bytes(value)}, self.where)
        try:
            return self._fields.take(unpack(value), self.where)
        except SourceError as error:
            raise self._broken(file, number, str(error)) from error

    def raw(self, index: int) -> bytearray:
        """Return a sample's value as the file has it."""
        return self._value(*self._parts.locate(index))

    def close(self) -> None:
        """Close this process's files."""
        for descriptor in self._descriptors:
            descriptor.close()

    def read_many(self, indices: np.ndarray) -> list[Sample]:
        """Return samples; values that lie close together are read at once."""
        found = []
        for file, places, own in self._parts.split(indices):
            values = self._values(file, own)
            if self._is_packed(file):
                samples = [self._fields.take(unpack(bytearray(value)), self.where) for value in values]
            else:
                samples = samples_of(["key", "value"], [self._files[file].index().take_keys(own), values])
                if self._fields.chosen is not None:
                    samples = [self._fields.take(sample, self.where) for sample in samples]
            found.append((places, samples))
        return put_in_order(found, len(indices))

    def ready(self, indices: np.ndarray) -> np.ndarray:
        """Return the samples if all of them are small."""
        sizes = [self._files[file].index().sizes[own] for file, _, own in self._parts.split(indices)]
        return indices if all((one <= _SMALL_NBYTES // 16).all() for one in sizes) else indices[:0]

    def _values(self, file: int, numbers: np.ndarray) -> list[bytes]:
        """Return several values; what is odd about one is found by reading them one by one."""
        try:
            values = self._read_values(file, numbers)
        except OSError:
            values = None
        return [bytes(self._value(file, number)) for number in numbers.tolist()] if values is None else values

    def _read_values(self, file: int, numbers: np.ndarray) -> list[bytes] | None:
        index = self._files[file].index()
        places, sizes = index.places[numbers], index.sizes[numbers]
        on_overflow = places % index.page_nbytes == PAGE.size
        begins = places - np.where(on_overflow, PAGE.size, 0)
        begin, end = int(begins.min()), int((places + sizes).max())
        if (sizes > min(_SMALL_NBYTES, self._max_record_nbytes)).any():
            return None
        descriptor, heads = self._descriptors[file].get(), (places - begins).tolist()
        if end - begin > 2 * int(sizes.sum()):
            spans = zip(begins.tolist(), (places + sizes - begins).tolist(), strict=True)
            found = [os.pread(descriptor, nbytes, at) for at, nbytes in spans]
            values = [data[head:] if head else data for data, head in zip(found, heads, strict=True)]
            pages = [data[:head] for data, head in zip(found, heads, strict=True)]
        else:
            data = os.pread(descriptor, end - begin, begin)
            starts = (places - begin).tolist()
            values = [data[start : start + size] for start, size in zip(starts, sizes.tolist(), strict=True)]
            pages = [data[start - head : start] for start, head in zip(starts, heads, strict=True)]
        is_whole = all(map(operator.eq, map(len, values), sizes.tolist()))
        if is_whole and on_overflow.any():
            numbered = zip(pages, (begins // index.page_nbytes).tolist(), sizes.tolist(), heads, strict=True)
            is_whole = all(
                not head or _holds(page, number, size, index.page_nbytes) for page, number, size, head in numbered
            )
        return values if is_whole else None

    def _is_packed(self, file: int) -> bool:
        found = self._packed.get(file)
        if found is None:
            try:
                found = self._value(file, 0).startswith(MAGIC)
            except RecordError:
                found = False
            self._packed[file] = found
        return found

    def _value(self, file: int, number: int) -> bytearray:
        one = self._files[file].index()
        place, nbytes = int(one.places[number]), int(one.sizes[number])
        if nbytes > self._max_record_nbytes:
            raise self._broken(
                file, number, f"{nbytes} bytes are more than max_record_nbytes={self._max_record_nbytes}"
            )
        page, within = divmod(place, one.page_nbytes)
        on_overflow = within == PAGE.size  # no node of a leaf begins there: its places of nodes do
        descriptor = self._descriptors[file].get()
        head = bytearray(PAGE.size if on_overflow else 0)
        try:
            if nbytes > _SMALL_NBYTES and place + nbytes > os.fstat(descriptor).st_size:
                raise OSError("it is truncated")
            value = bytearray(nbytes)
            found = os.preadv(descriptor, [head, value], place - len(head)) - len(head)
            if found < nbytes:
                _fill(descriptor, memoryview(value)[max(0, found) :], place + max(0, found))
        except OSError as error:
            raise self._broken(file, number, f"its {nbytes} bytes cannot be read: {error}") from error
        if on_overflow and not _holds(head, page, nbytes, one.page_nbytes):
            raise self._broken(file, number, f"page {page} does not hold its {nbytes} bytes")
        return value

    def _broken(self, file: int, number: int, reason: str) -> RecordError:
        one = self._files[file].index()
        return RecordError(self._files[file].path, int(one.places[number]), one.key(number), reason)


def _holds(head: bytes | bytearray, page: int, nbytes: int, page_nbytes: int) -> bool:
    """Return whether a page begins a value of some bytes."""
    own, _, flags, low, high = PAGE.unpack(head)
    return bool(own == page and flags & OVERFLOW and (low | high << 16) * page_nbytes >= PAGE.size + nbytes)


def _data_file(path: str, storage: Storage) -> str:
    """Return the file that a path stands for."""
    local = storage.local(path)
    return os.path.join(local, "data.mdb") if os.path.isdir(local) else local


def _open(path: str) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SourceError(f"{path} cannot be opened: {error}") from error
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def _fill(descriptor: int, rest: memoryview, place: int) -> None:
    """Read what a first read has not given: it may give less than was asked for."""
    while rest:
        found = os.preadv(descriptor, [rest], place)
        if not found:
            raise OSError("it is truncated")
        rest, place = rest[found:], place + found


class LMDBWriter:
    """Writes samples to a new database, each packed, under the keys "0000000000", "0000000001", ...

    Args:
        path: a file where it ends in .lmdb or .mdb, else a folder.
        schema: of the samples.
        commit_nbytes: written in one transaction.

    Raises:
        SourceError: the path exists, or samples of this schema cannot be packed.
    """

    def __init__(self, path: str, schema: Schema, *, commit_nbytes: int = _COMMIT_NBYTES) -> None:
        if why_unsupported(schema):
            raise SourceError(f"{path}: {why_unsupported(schema)}")
        self._path = path
        self._schema = schema
        self._database = _Database(path, commit_nbytes)

    def write(self, sample: Sample) -> None:
        """Add a sample.

        Raises:
            SourceError: it does not fit the schema, or the disk is full.
        """
        self._database.add(pack(fitted(self._schema, sample, self._path)))

    def close(self) -> None:
        """Finish the file."""
        self._database.close()


class _Database:
    """A new database that values are added to."""

    def __init__(self, path: str, commit_nbytes: int) -> None:
        self._lmdb = need("lmdb", "lmdb")
        if os.path.exists(path):
            raise SourceError(f"{path} exists; a new database needs another path")
        self._path = path
        self._commit_nbytes = commit_nbytes
        self._count = 0
        self._waiting: list[bytes] = []
        self._waiting_nbytes = 0
        try:
            self._environment = self._lmdb.open(
                path, subdir=not path.endswith((".lmdb", ".mdb")), map_size=4 * commit_nbytes, lock=False, sync=False
            )
        except self._lmdb.Error as error:
            raise SourceError(f"{path} cannot be written: {error}") from error

    def add(self, value: bytes) -> None:
        self._waiting.append(value)
        self._waiting_nbytes += len(value)
        if self._waiting_nbytes >= self._commit_nbytes:
            self._commit()

    def close(self) -> None:
        try:
            self._commit()
            self._environment.sync(True)
        except self._lmdb.Error as error:
            raise SourceError(f"{self._path} cannot be written: {error}") from error
        finally:
            self._environment.close()

    def _commit(self) -> None:
        while True:
            try:
                with self._environment.begin(write=True) as transaction:
                    for number, value in enumerate(self._waiting, self._count):
                        transaction.put(b"%010d" % number, value, append=True)
                break
            except self._lmdb.MapFullError:
                size = self._environment.info()["map_size"]
                self._environment.set_mapsize(2 * size + self._waiting_nbytes)
            except self._lmdb.Error as error:
                raise SourceError(f"{self._path} cannot be written: {error}") from error
        self._count += len(self._waiting)
        self._waiting.clear()
        self._waiting_nbytes = 0


def concat_files(parts: Sequence[str], path: str) -> None:
    """Make one database of several that `LMDBWriter` made, in their order: values are copied as they are.

    Raises:
        SourceError: one cannot be read, or `path` cannot be written.
    """
    database = _Database(path, _COMMIT_NBYTES)
    try:
        for part in parts:
            source = LMDBSource([KeyTree(_data_file(part, Storage()), None, NOT_SAMPLES)], part, Selection(), 1 << 40)
            try:
                for number in range(len(source)):
                    database.add(bytes(source.raw(number)))
            finally:
                source.close()
    finally:
        database.close()
