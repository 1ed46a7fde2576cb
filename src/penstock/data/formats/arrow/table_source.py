"""Tables, as Parquet and Arrow files hold them: rows lie in groups, a group is unpacked whole, a row is a sample.

types.py lists what columns may hold. A process caches some unpacked groups, so that neighbouring samples are unpacked
together: `chunk_starts` is where groups begin. Arrays of samples are read-only views of unpacked groups.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.core.per_process import PerProcess
from penstock.data.chunks.chunk_cache import ChunkCache
from penstock.data.concat_index import ConcatIndex
from penstock.data.formats.arrow.columns import Column
from penstock.data.formats.arrow.null_values import null_values
from penstock.data.formats.arrow.partitions import PartitionLeaf, partition_leaves
from penstock.data.formats.arrow.types import UNTYPED, Leaf, leaves, merged
from penstock.data.formats.partition_names import check_left_out
from penstock.data.optional import need
from penstock.data.sample_batch import put_in_order, samples_of
from penstock.data.schema import Errors, Sample, Schema, Selection
from penstock.data.source import Source
from penstock.data.storage.storage import Storage

HELD_NBYTES = 512 << 20
"""Of unpacked groups that a process keeps."""

MOST_GROUP_NBYTES = 2 << 30
"""Of a group that is unpacked."""

_MOST_ROWS = 1 << 40
_SMALL_NBYTES = 64 << 10
"""Of a row, up to which rows are read together."""


@contextmanager
def translate_errors(path: str, what: str = "it cannot be read") -> Iterator[None]:
    """Raise SourceError for whatever Arrow raises about a file.

    >>> with translate_errors("a.parquet"):
    ...     raise OSError("no")
    Traceback (most recent call last):
    penstock.core.errors.SourceError: a.parquet: it cannot be read: no
    """
    try:
        yield
    except SourceError:
        raise
    except arrow_errors() as error:
        raise SourceError(f"{path}: {what}: {str(error)[:500]}") from error


def arrow_errors() -> tuple[type[Exception], ...]:
    """Return what Arrow raises about damaged files."""
    return need("pyarrow", "parquet").ArrowException, OSError, ValueError, MemoryError, OverflowError, LookupError


class TableSource(Source):
    """Rows of Parquet or Arrow files, one after another, by number.

    A format gives `scan` and `batches`. Groups are unpacked by any thread, and each of them once while it is kept.

    Args:
        paths: of files with the same columns.
        storage: where they lie.
        fields: which fields samples have.
        errors: unused: reading a broken sample raises RecordError.
        null: the value of a field in rows where it is null, as in {"label": -1}; else text, bytes and objects are None,
            and reading a number or an array raises RecordError. It becomes of the field's type, which has to hold it.
        objects: columns that are Python objects whatever they hold: lists that are no array, structs as dicts.
        partitions: columns that are in the names of folders (Hive partitions), to be fields: ["label"] for
            label=cat/a.parquet. Integers are int64, all else is text.
        held_nbytes: of unpacked groups that a process keeps; views of a map cost nearly nothing. A pass in order
            (`for sample in source`) keeps one group.
        max_record_nbytes: the most that a group may have unpacked.

    Raises:
        SourceError: a file cannot be read, a field is not there, is something else in another file, or cannot be read
            though it was asked for.
        OptionError: a value for nulls does not fit its field.
    """

    reads_batches = True

    def __init__(
        self,
        paths: list[str],
        storage: Storage,
        fields: Selection,
        errors: Errors,
        *,
        null: Mapping[str, Any] | None = None,
        objects: Sequence[str] = (),
        partitions: Sequence[str] = (),
        held_nbytes: int = HELD_NBYTES,
        max_record_nbytes: int = MOST_GROUP_NBYTES,
    ) -> None:
        for option, columns in (("objects", objects), ("partitions", partitions)):
            if isinstance(columns, str):
                raise OptionError(f"{option}={columns!r} has to be a list of columns, as in [{columns!r}]")
        if held_nbytes < 0 or max_record_nbytes < 1:
            raise OptionError(f"{held_nbytes=} must not be negative, {max_record_nbytes=} not 0")
        self.where = paths[0] if len(paths) == 1 else f"{paths[0]} and others"
        self._paths = tuple(paths)
        self._held_nbytes = held_nbytes
        self._max_record_nbytes = max_record_nbytes
        rows, schemas = zip(*self.scan(storage), strict=True)
        groups = [count for of_file in rows for count in of_file]
        if min(groups, default=0) < 0 or sum(groups) > _MOST_ROWS:
            spans = f"in groups of {min(groups)} to {max(groups)}"
            raise SourceError(f"{self.where}: it states {sum(groups)} rows, {spans}")
        there = {*schemas[0].names, *partitions}
        check_left_out(self._paths, lambda: there, fields, "pass partitions={} to read it")
        self._leaves = resolve_fields(self._paths, schemas, fields, objects, partitions)
        self._names = tuple(self._leaves[0])
        self._fields = {name: leaf.field for name, leaf in self._leaves[0].items()}
        self._nulls = null_values(null or {}, self._fields)
        self._files = ConcatIndex(map(len, rows))
        self._parts = ConcatIndex(groups)
        self._held = self._new_cache()

    def _new_cache(self) -> PerProcess[ChunkCache[UnpackedGroup]]:
        return PerProcess(partial(ChunkCache, self._held_nbytes, self._held_nbytes), ChunkCache.clear)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def schema(self) -> Schema:
        """The fields of its samples, as in the files' schemas."""
        return dict(self._fields)

    @property
    def chunk_starts(self) -> np.ndarray:
        """Where each group with rows begins, and the number of rows."""
        return np.unique(np.asarray(self._parts.starts, np.int64))

    def scan(self, storage: Storage) -> Iterable[tuple[list[int], Any]]:
        """Yield the rows of each group of a file, and Arrow's schema, for each file."""
        raise NotImplementedError

    def batches(self, file: int, number: int, columns: Iterable[tuple[str, ...]]) -> Iterator[tuple[Any, int]]:
        """Yield the record batches of a group of a file, with these columns at least, and what keeping each costs."""
        raise NotImplementedError

    def path_of(self, index: int) -> str:
        """Return the path of the file that has a sample."""
        return self._paths[self._files.locate(self._parts.locate(index)[0])[0]]

    def offset(self, file: int, number: int) -> int:
        """Return the byte at which a group of a file begins; -1 where nobody knows."""
        return -1

    def read(self, index: int) -> Sample:
        """Return a sample."""
        number, row = self._parts.locate(index)
        unpacked = self._unpacked(self._held.get(), number, row)
        piece, within = unpacked.parts.locate(row)
        sample, name = {}, ""
        try:
            for name, column in zip(self._names, unpacked.pieces[piece], strict=True):
                value = column.value(within)
                sample[name] = self._null(name) if value is None else value
        except SourceError as error:
            raise self._broken(number, row, f"field {name!r}: {error}") from error
        return sample

    def read_many(self, indices: np.ndarray) -> list[Sample]:
        """Return samples, field by field."""
        found, held = [], self._held.get()
        for number, places, rows in self._parts.split(indices):
            unpacked = self._unpacked(held, number, rows[0])
            if len(unpacked.pieces) == 1:
                found.append((places, self._samples(unpacked.pieces[0], rows)))
                continue
            for piece, inner, own in unpacked.parts.split(rows):
                there = places if isinstance(inner, slice) else inner if isinstance(places, slice) else places[inner]
                found.append((there, self._samples(unpacked.pieces[piece], own)))
        return put_in_order(found, len(indices))

    def read_range(self, start: int, stop: int) -> list[Sample]:
        """Return samples from `start` on, to `stop` or to the end of what was unpacked together, if that is first."""
        number, row = self._parts.locate(start)
        held = self._held.get()
        if not row:  # a pass in order has left the group before, and its memory can be used again
            held.drop(number - 1)
        unpacked = self._unpacked(held, number, row)
        piece, within = unpacked.parts.locate(row)
        last = min(within + stop - start, unpacked.parts.starts[piece + 1] - unpacked.parts.starts[piece])
        return self._samples(unpacked.pieces[piece], slice(within, last))

    def _samples(self, columns: list[Column], rows: np.ndarray | slice) -> list[Sample]:
        values = []
        for name, column in zip(self._names, columns, strict=True):
            found = column.take(rows)
            if column.has_nulls:
                found = [self._null(name) if value is None else value for value in found]
            values.append(found)
        return samples_of(self._names, values)

    def _null(self, name: str) -> Any:
        if name in self._nulls:
            return self._nulls[name]
        if self._fields[name].kind in ("text", "bytes", "object"):
            return None
        raise SourceError(f"it is null; pass a value to use instead: null={{{name!r}: ...}}")

    def ready(self, indices: np.ndarray) -> np.ndarray:
        """Return the samples of groups that are unpacked, and small."""
        ready, held = [indices[:0]], self._held.get()
        for number, places, _ in self._parts.split(indices):
            unpacked = held.peek(number)
            if unpacked is not None and unpacked.nbytes <= _SMALL_NBYTES * len(unpacked.parts):
                ready.append(indices[places])
        return np.concatenate(ready)

    def _unpacked(self, held: ChunkCache[UnpackedGroup], number: int, row: int) -> UnpackedGroup:
        unpacked = held.get(number, partial(self._unpack, number))
        if unpacked.failure:
            raise self._broken(number, row, unpacked.failure)
        return unpacked

    def select_fields(self, fields: Sequence[str]) -> Source:
        """Return a source with these fields only; others' columns are not read."""
        names = Selection.of(list(fields)).names(self._names, self.where)
        other = copy.copy(self)
        other._names = tuple(names)
        other._fields = {name: self._fields[name] for name in names}
        other._held = self._new_cache()
        return other

    def close(self) -> None:
        """Free the groups that this process has cached."""
        self._held.close()

    def _unpack(self, number: int) -> UnpackedGroup:
        """Return a group's columns, or why it cannot be unpacked."""
        file, place = self._files.locate(number)
        wanted = [(name, self._leaves[file][name]) for name in self._names]
        columns = [leaf.path for _, leaf in wanted if not isinstance(leaf, PartitionLeaf)]
        pieces, counts, nbytes = [], [], 0
        try:
            for batch, cost in self.batches(file, place, columns):
                if batch.num_rows:
                    pieces.append([_column(name, leaf, batch) for name, leaf in wanted])
                    counts.append(batch.num_rows)
                nbytes += cost
                if nbytes > self._max_record_nbytes:
                    raise SourceError(
                        f"its group has {nbytes} bytes and more unpacked; max_record_nbytes is "
                        f"{self._max_record_nbytes}"
                    )
        except SourceError as error:
            return UnpackedGroup(failure=str(error))
        except arrow_errors() as error:
            if getattr(error, "errno", None):  # the disk's, and may be gone the next time
                raise SourceError(f"{self._paths[file]} cannot be read: {error}") from error
            return UnpackedGroup(failure=f"its group cannot be unpacked: {str(error)[:500]}")
        stated = self._parts.starts[number + 1] - self._parts.starts[number]
        if sum(counts) != stated:
            return UnpackedGroup(failure=f"its group has {sum(counts)} rows, and {stated} in the file's metadata")
        return UnpackedGroup(ConcatIndex(counts), pieces, nbytes)

    def _broken(self, number: int, row: int, reason: str) -> RecordError:
        file, place = self._files.locate(number)
        first = self._parts.starts[number] - self._parts.starts[self._files.starts[file]]
        return RecordError(self._paths[file], self.offset(file, place), first + int(row), reason)


def _column(name: str, leaf: Leaf, batch: Any) -> Column:
    try:
        return leaf.column(batch)
    except SourceError as error:
        raise SourceError(f"field {name!r}: {error}") from error


def resolve_fields(
    paths: Sequence[str],
    schemas: Sequence[Any],
    fields: Selection,
    objects: Sequence[str],
    partitions: Sequence[str] = (),
) -> list[dict[str, Leaf]]:
    """Return what reads the fields of each file, by their names in samples, in units that hold those of all files.

    Warns of fields that cannot be read, and are left out as nobody asked for them by name.

    Raises:
        SourceError: a field is not there, is something else in another file, or cannot be read though it was asked for.
    """
    found: dict[str, Leaf] = {}
    unread: dict[str, str] = {}
    files: list[dict[str, Leaf | str]] = []
    stated = partition_leaves(paths, partitions)
    for number, (path, schema) in enumerate(zip(paths, schemas, strict=True)):
        is_alike = number and schema.equals(schemas[number - 1], check_metadata=True)
        if is_alike and stated[number] == stated[number - 1]:
            files.append(files[-1])
            continue
        there = _fields_there(path, schema, objects, stated[number])
        files.append({name: there[inner] for name, inner in fields.names(there, path).items()})
        if files[-1].keys() != files[0].keys():
            raise SourceError(f"{path}: it has the fields {sorted(files[-1])}, and {paths[0]} {sorted(files[0])}")
        for name, leaf in files[-1].items():
            if isinstance(leaf, str):
                unread.setdefault(name, f"{path}: field {fields.names(there, path)[name]!r} cannot be read: {leaf}")
            else:
                found[name] = _merged(found.get(name, leaf), leaf, path, paths[0])
    for name, leaf in found.items():
        own = "/".join(leaf.path)
        if leaf.field == UNTYPED and own not in objects:
            why = "all its rows are null, and it has no type"
            unread.setdefault(name, f"{paths[0]}: field {own!r} cannot be read: {why}")
    readable = [name for name in files[0] if name not in unread]
    if unread and (fields.chosen is not None or not readable):
        raise SourceError(f"{next(iter(unread.values()))}; leave it out: fields=")
    for why in unread.values():
        warnings.warn(f"left out: {why}", stacklevel=2)
    read: list[dict[str, Leaf]] = []
    for number, one in enumerate(files):
        if number and one is files[number - 1]:
            read.append(read[-1])
        else:
            read.append({name: leaf.read_as(found[name]) for name in readable if isinstance(leaf := one[name], Leaf)})
    return read


def _fields_there(
    path: str, schema: Any, objects: Sequence[str], partitions: Mapping[str, PartitionLeaf]
) -> dict[str, Leaf | str]:
    """Return what samples of a file can have; for what cannot be read, why."""
    with translate_errors(path):
        there = leaves(schema, objects)
        Selection.of(list(objects)).names(there, path)
    for name in partitions:
        if name in there:
            raise SourceError(f"{path}: it has a column {name!r}; leave it out of partitions=")
    return {**there, **partitions}


def _merged(one: Leaf, other: Leaf, path: str, first: str) -> Leaf:
    wide = one if one.field == other.field else merged(one, other)
    if wide is None:
        raise SourceError(
            f"{path}: field {'/'.join(other.path)!r} is {other.field.words()}, and {one.field.words()} in {first}"
        )
    return wide


@dataclass(slots=True)
class UnpackedGroup:
    """A group's columns, in pieces."""

    parts: ConcatIndex = field(default_factory=lambda: ConcatIndex(()))
    """The rows of each piece."""
    pieces: list[list[Column]] = field(default_factory=list)
    nbytes: int = 0
    failure: str = ""
    """Why there are none."""
