"""The rows of files as samples: what the readers of tables and arrays have in common.

    file      has fields and groups of rows; files follow each other, in one type that holds the numbers of all
    group     is unpacked whole, by one thread, and kept a while: a row group, a record batch, a chunk of an array
    column    a field of a group: values of the rows that are asked for. None is a null, for which `null=` has a value

A format lists its files (`RowFile`) and reads groups (`RowSource.read_group`). Which group is kept, batches, order,
nulls, limits, threads and errors are here. A stream of a source has the same rows, group after group.
"""

from __future__ import annotations

import copy
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.core.per_process import PerProcess
from penstock.data.chunk_shuffle import SHUFFLE_BLOCK
from penstock.data.sample_batch import put_in_order, samples_of
from penstock.data.schema import Field, Sample, Schema, Selection, common_dtype, field_of, plain
from penstock.data.source import Source

HELD_NBYTES = 512 << 20
"""Of unpacked groups that a process keeps."""

MOST_GROUP_NBYTES = 2 << 30
"""Of a group that is unpacked."""

LIBRARY_ERRORS: tuple[type[Exception], ...] = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SystemError,
    TypeError,
    ValueError,
)
"""What libraries raise for data that are broken, use features that they lack, or cannot be written."""

_MOST_ROWS = 1 << 40
_SMALL_NBYTES = 64 << 10
"""Of a row, up to which rows are read together."""
_SMALL_CACHE_NBYTES = 16 << 20


@contextmanager
def translate_errors(what: str, errors: tuple[type[Exception], ...] = LIBRARY_ERRORS) -> Iterator[None]:
    """Raise SourceError, of what went wrong, for whatever a library raises.

    >>> with translate_errors("a.parquet cannot be read"):
    ...     raise OSError("no")
    Traceback (most recent call last):
    penstock.core.errors.SourceError: a.parquet cannot be read: no
    """
    try:
        yield
    except SourceError:
        raise
    except errors as error:
        raise SourceError(f"{what}: {str(error)[:500]}") from error


# ── which part has a row ────────────────────────────────────────────────────────────────────────────────────


class ConcatIndex:
    """Numbers the samples of parts (files, row groups) that follow each other; parts may be empty.

    Args:
        counts: how many samples each part holds.

    >>> index = ConcatIndex([3, 0, 4])
    >>> len(index), index.locate(2), index.locate(3)
    (7, (0, 2), (2, 0))
    """

    def __init__(self, counts: Iterable[int]) -> None:
        self._array = np.zeros(0, np.int64)
        self.starts = [0, *accumulate(counts)]
        """The number at which each part begins, and how many all hold."""

    def __len__(self) -> int:
        return self.starts[-1]

    def locate(self, index: int) -> tuple[int, int]:
        """Return the part that has sample `index`, and its number in the part."""
        part = bisect_right(self.starts, index) - 1
        return part, index - self.starts[part]

    def split(self, indices: np.ndarray) -> Iterator[tuple[int, np.ndarray | slice, np.ndarray]]:
        """Yield, of each part that has some of these samples, its number, their places in `indices`, their own numbers.

        >>> [(part, own.tolist()) for part, _, own in ConcatIndex([3, 0, 4]).split(np.array([4, 0, 6]))]
        [(0, [0]), (2, [1, 3])]
        """
        if not len(indices):
            return
        if len(self.starts) == 2:
            yield 0, slice(None), indices
            return
        if len(self._array) != len(self.starts):
            self._array = np.array(self.starts, np.int64)
        parts = np.searchsorted(self._array, indices, "right") - 1
        first = int(parts[0])
        if (parts == first).all():
            yield first, slice(None), indices - self.starts[first]
            return
        order = np.argsort(parts, kind="stable")
        parts = parts[order]
        own = indices[order] - self._array[parts]
        cuts = (np.flatnonzero(parts[1:] != parts[:-1]) + 1).tolist()
        for begin, end in zip([0, *cuts], [*cuts, len(order)], strict=True):
            yield int(parts[begin]), order[begin:end], own[begin:end]


# ── which groups are kept ───────────────────────────────────────────────────────────────────────────────────


class HasNbytes(Protocol):
    """Has a size in memory, as an array does."""

    @property
    def nbytes(self) -> int:
        """The bytes."""


_Chunk = TypeVar("_Chunk", bound=HasNbytes)


class ChunkCache(Generic[_Chunk]):
    """What this process has unpacked: each chunk once, by one thread. The least recently used are dropped first.

    A thread reads from `SHUFFLE_BLOCK` chunks at a time in a shuffled pass, so that twice as many for each suffice.

    Args:
        chunk_nbytes: of the largest one.
        most_nbytes: the limit of all; one chunk is always kept.

    >>> chunks = ChunkCache(8, 1 << 20)
    >>> chunks.get(3, lambda: np.zeros(1)) is chunks.get(3, lambda: np.ones(1))
    True
    """

    def __init__(self, chunk_nbytes: int, most_nbytes: int) -> None:
        self._chunk_nbytes = chunk_nbytes
        self._most_nbytes = most_nbytes
        self._lock = threading.Lock()
        self._held: OrderedDict[Hashable, _Chunk] = OrderedDict()
        self._held_nbytes = 0
        self._gates: dict[Hashable, threading.Lock] = {}
        self._readers: set[int] = set()

    def get(self, key: Hashable, unpack: Callable[[], _Chunk]) -> _Chunk:
        """Return the chunk `key`; `unpack` makes it if it is not cached, while other threads that ask for it wait."""
        with self._lock:
            found = self._held.get(key)
            if found is not None:
                self._held.move_to_end(key)
                return found
            self._readers.add(threading.get_ident())
            gate = self._gates.setdefault(key, threading.Lock())
        with gate:
            with self._lock:
                found = self._held.get(key)
            if found is not None:
                return found
            try:
                found = unpack()
                self._keep(key, found)
            finally:
                with self._lock:
                    self._gates.pop(key, None)
        return found

    def peek(self, key: Hashable) -> _Chunk | None:
        """Return the chunk `key` if it is there, without a claim to keep it."""
        return self._held.get(key)

    def drop(self, key: Hashable) -> None:
        """Drop the chunk `key`, if it is there."""
        with self._lock:
            found = self._held.pop(key, None)
            self._held_nbytes -= found.nbytes if found is not None else 0

    def clear(self) -> None:
        """Drop all chunks."""
        with self._lock:
            self._held.clear()
            self._held_nbytes = 0

    def _keep(self, key: Hashable, chunk: _Chunk) -> None:
        with self._lock:
            wanted = max(_SMALL_CACHE_NBYTES, 2 * SHUFFLE_BLOCK * self._chunk_nbytes * len(self._readers))
            room = min(self._most_nbytes, wanted)
            self._held[key] = chunk
            self._held_nbytes += chunk.nbytes
            while self._held_nbytes > room and len(self._held) > 1:
                _, oldest = self._held.popitem(last=False)
                self._held_nbytes -= oldest.nbytes


# ── what a format gives ─────────────────────────────────────────────────────────────────────────────────────


Rows = slice | np.ndarray
"""Which rows of a column: a slice with a start and a stop, or int64 numbers in any order. Not none."""


class Column(NamedTuple):
    """One field of some rows. Its values may be read-only views of what was unpacked, or copies."""

    take: Callable[[Rows], Sequence[Any] | np.ndarray]
    """Returns the values of some rows, one for each; None where one is null.

    It raises SourceError if one is broken. Called by any thread, and many at a time."""

    has_nulls: bool = False
    """Whether a value may be None."""


@dataclass(frozen=True, slots=True)
class RowFile:
    """One file. Can be pickled."""

    path: str
    fields: Schema
    """What samples have of it, by their names in samples."""
    groups: Sequence[int]
    """The rows of each group; some may have none. Tiny chunks are joined to groups: there is a number for each."""


class RowSource(Source):
    """Rows of files, one after another, by number.

    A format gives `read_group`. Groups are unpacked by any thread, and each of them once while it is kept.

    Args:
        files: with the same fields. Numbers that differ in type are read in one that holds those of all exactly.
        null: the value of a field in rows where it is null, as in {"label": -1}; else text, bytes and objects are None,
            and reading a number or an array raises RecordError. It becomes of the field's type, which has to hold it.
        held_nbytes: of unpacked groups that a process keeps. A pass in order (`for sample in source`) keeps one group.
        group_nbytes: of the largest group, where it is known: no more are kept than a shuffled pass reads from.
        max_record_nbytes: the most that a group may have unpacked.

    Raises:
        SourceError: files have different fields, or state rows that cannot be.
        OptionError: a value for nulls does not fit its field.
    """

    reads_batches = True

    unpack_errors: tuple[type[Exception], ...] = LIBRARY_ERRORS
    """What `read_group` raises for a group that is broken."""

    def __init__(
        self,
        files: Sequence[RowFile],
        *,
        null: Mapping[str, Any] | None = None,
        held_nbytes: int = HELD_NBYTES,
        group_nbytes: int | None = None,
        max_record_nbytes: int = MOST_GROUP_NBYTES,
    ) -> None:
        if held_nbytes < 0 or max_record_nbytes < 1:
            raise OptionError(f"{held_nbytes=} must not be negative, {max_record_nbytes=} not 0")
        self.where = files[0].path if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more"
        self._paths = tuple(file.path for file in files)
        self._cache_nbytes = held_nbytes if group_nbytes is None else group_nbytes, held_nbytes
        self._max_record_nbytes = max_record_nbytes
        groups = [count for file in files for count in file.groups]
        if min(groups, default=0) < 0 or sum(groups) > _MOST_ROWS:
            spans = f"in groups of {min(groups)} to {max(groups)}"
            raise SourceError(f"{self.where}: it states {sum(groups)} rows, {spans}")
        self._fields = common_fields(files)
        dtypes = [{name: field.dtype for name, field in file.fields.items()} for file in files]
        wide = {name: field.dtype for name, field in self._fields.items()}
        self._narrow = {number: own for number, own in enumerate(dtypes) if own != wide}
        """The dtypes in files of which some are widened."""
        self._nulls = null_values(null or {}, self._fields)
        self._files = ConcatIndex(len(file.groups) for file in files)
        self._parts = ConcatIndex(groups)
        self._held = self._new_cache()

    def _new_cache(self) -> PerProcess[ChunkCache[_Group]]:
        return PerProcess(partial(ChunkCache, *self._cache_nbytes), ChunkCache.clear)

    def read_group(self, file: int, group: int, names: Sequence[str]) -> Iterator[tuple[int, Sequence[Column], int]]:
        """Yield the pieces in which a group of a file is unpacked, one at least if it has rows.

        Args:
            file: its number among the files.
            group: its number in the file.
            names: of fields, as samples have them. Others are not to be read.

        Yields:
            How many rows follow, a column of them for each name, and the bytes that keeping these columns takes.
        """
        raise NotImplementedError

    def offset(self, file: int, group: int) -> int:
        """Return the byte at which a group of a file begins, for errors; -1 where nobody knows."""
        return -1

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def schema(self) -> Schema:
        """The fields of its samples, as in the files' schemas."""
        return dict(self._fields)

    @property
    def chunk_starts(self) -> np.ndarray | None:
        """Where each group with rows begins, and the number of rows."""
        return np.unique(np.asarray(self._parts.starts, np.int64))

    def path_of(self, index: int) -> str:
        """Return the path of the file that has a sample."""
        return self._paths[self._files.locate(self._parts.locate(index)[0])[0]]

    def read(self, index: int) -> Sample:
        """Return a sample."""
        number, row = self._parts.locate(index)
        group = self._group(self._held.get(), number, row)
        piece, within = group.parts.locate(row)
        name, wanted, sample = "", slice(within, within + 1), {}
        try:
            for name, column in zip(self._fields, group.pieces[piece], strict=True):
                (value,) = column.take(wanted)
                sample[name] = self._null(name) if value is None else value
        except SourceError as error:
            raise self._broken(number, row, f"field {name!r}: {error}") from error
        return sample

    def read_many(self, indices: np.ndarray) -> list[Sample]:
        """Return samples, field by field."""
        found, held = [], self._held.get()
        for number, places, rows in self._parts.split(indices):
            group = self._group(held, number, rows[0])
            for piece, inner, own in group.parts.split(rows):
                there = places if isinstance(inner, slice) else inner if isinstance(places, slice) else places[inner]
                found.append((there, self._samples(group.pieces[piece], own)))
        return put_in_order(found, len(indices))

    def read_range(self, start: int, stop: int) -> list[Sample]:
        """Return samples from `start` on, to `stop` or to the end of what was unpacked together, if that is first."""
        number, row = self._parts.locate(start)
        held = self._held.get()
        if not row:  # a pass in order has left the group before, and its memory can be used again
            held.drop(number - 1)
        group = self._group(held, number, row)
        piece, within = group.parts.locate(row)
        last = min(within + stop - start, group.parts.starts[piece + 1] - group.parts.starts[piece])
        return self._samples(group.pieces[piece], slice(within, last))

    def _samples(self, columns: Sequence[Column], rows: Rows) -> list[Sample]:
        values = []
        for name, column in zip(self._fields, columns, strict=True):
            found: Iterable[Any] = column.take(rows)
            if column.has_nulls:
                found = [self._null(name) if value is None else value for value in found]
            values.append(found)
        return samples_of([*self._fields], values)

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
            group = held.peek(number)
            if group is not None and group.nbytes <= _SMALL_NBYTES * len(group.parts):
                ready.append(indices[places])
        return np.concatenate(ready)

    def select_fields(self, fields: Sequence[str]) -> Source:
        """Return a source with these fields only; others' columns are not read."""
        other = copy.copy(self)
        chosen = Selection.of(list(fields)).names(self._fields, self.where)
        other._fields = {name: self._fields[name] for name in chosen}
        other._held = self._new_cache()
        return other

    def close(self) -> None:
        """Free the groups that this process has cached."""
        self._held.close()

    def _group(self, held: ChunkCache[_Group], number: int, row: int) -> _Group:
        group = held.get(number, partial(self._unpack, number))
        if group.failure:
            raise self._broken(number, row, group.failure)
        return group

    def _unpack(self, number: int) -> _Group:
        """Return a group's columns, or why it cannot be unpacked."""
        file, place = self._files.locate(number)
        pieces, counts, nbytes, narrow = [], [], 0, self._narrow.get(file)
        try:
            for count, columns, cost in self.read_group(file, place, [*self._fields]):
                if count:
                    pieces.append(self._widened(narrow, columns) if narrow else columns)
                    counts.append(count)
                nbytes += cost
                if nbytes > self._max_record_nbytes:
                    raise SourceError(
                        f"its group has {nbytes} bytes and more unpacked; max_record_nbytes is "
                        f"{self._max_record_nbytes}"
                    )
        except SourceError as error:
            return _Group(failure=str(error))
        except self.unpack_errors as error:
            if getattr(error, "errno", None):  # the disk's, and may be gone the next time
                raise SourceError(f"{self._paths[file]} cannot be read: {error}") from error
            return _Group(failure=f"its group cannot be unpacked: {str(error)[:500]}")
        stated = self._parts.starts[number + 1] - self._parts.starts[number]
        if sum(counts) != stated:
            return _Group(failure=f"its group has {sum(counts)} rows, and {stated} in the file's metadata")
        return _Group(ConcatIndex(counts), pieces, nbytes)

    def _widened(self, narrow: Mapping[str, str], columns: Sequence[Column]) -> list[Column]:
        """Return columns in the types that all files have."""
        return [
            column
            if narrow[name] == field.dtype
            else Column(partial(_take_as, field.dtype, column.take), column.has_nulls)
            for (name, field), column in zip(self._fields.items(), columns, strict=True)
        ]

    def _broken(self, number: int, row: int, reason: str) -> RecordError:
        file, place = self._files.locate(number)
        first = self._parts.starts[number] - self._parts.starts[self._files.starts[file]]
        return RecordError(self._paths[file], self.offset(file, place), first + int(row), reason)


@dataclass(slots=True)
class _Group:
    """A group's columns, in pieces."""

    parts: ConcatIndex = field(default_factory=lambda: ConcatIndex(()))
    """The rows of each piece."""
    pieces: list[Sequence[Column]] = field(default_factory=list)
    nbytes: int = 0
    failure: str = ""
    """Why there are none."""


def _take_as(dtype: str, take: Callable[[Rows], Any], rows: Rows) -> Any:
    values = take(rows)
    if isinstance(values, np.ndarray):
        return values.astype(dtype)
    return [None if value is None else value.astype(dtype) for value in values]


def common_fields(files: Sequence[RowFile]) -> Schema:
    """Return the fields of all files, in a type that holds the numbers of all exactly.

    Raises:
        SourceError: there is none, or they have different fields.
    """
    common = dict(files[0].fields)
    for file in files[1:]:
        if file.fields is files[0].fields:
            continue
        if file.fields.keys() != common.keys():
            words = {name: field.words() for name, field in file.fields.items()}
            raise SourceError(
                f"{file.path} has the fields {words}, and {files[0].path} has {sorted(common)}; choose with fields= "
                "what both have"
            )
        for name, found in file.fields.items():
            wide = _common_field(common[name], found)
            if wide is None:
                raise SourceError(
                    f"field {name!r} of {file.path} is {found.words()}, and that of {files[0].path} "
                    f"{common[name].words()}; files that are opened together need the same, or one type that holds "
                    "both exactly"
                )
            common[name] = wide
    return common


def _common_field(one: Field, other: Field) -> Field | None:
    dtype = common_dtype(one.dtype, other.dtype) if one.dtype and other.dtype else ""
    if replace(one, dtype="", shape=()) != replace(other, dtype="", shape=()) or len(one.shape) != len(other.shape):
        return None
    if not dtype and one.dtype != other.dtype:
        return None
    sizes = (size if size == found else None for size, found in zip(one.shape, other.shape, strict=True))
    return replace(one, dtype=dtype, shape=tuple(sizes))


def null_values(null: Mapping[str, Any], fields: Schema) -> dict[str, Any]:
    """Return the value of each field's nulls, of the field's own type; of objects, as it is.

    Raises:
        OptionError: a field's type does not hold it: a batch with nulls would be of another type than one without.

    >>> null_values({"x": -1}, {"x": Field("number", "int32")})
    {'x': np.int32(-1)}
    """
    return {
        name: value if name not in fields or fields[name].kind == "object" else _typed(name, fields[name], value)
        for name, value in null.items()
    }


def _typed(name: str, field: Field, given: Any) -> Any:
    try:
        value = plain(given)
        found = field_of(value)
        is_alike = found.kind == field.kind and len(found.shape) == len(field.shape)
        is_of_size = all(size in (None, own) for size, own in zip(field.shape, found.shape, strict=is_alike))
        if is_alike and is_of_size:
            return value if field.kind in ("text", "bytes") else _cast(value, field.dtype)
        why = f"it is {found.words()}"
    except (SourceError, ValueError) as error:
        why = str(error)
    raise OptionError(
        f"null={{{name!r}: {str(given)[:80]}}} does not fit the field, which is {field.words()}: {why}; pass a value "
        f"that it holds, or have None and map it: objects=[{name!r}]"
    )


def _cast(value: Any, dtype: str) -> Any:
    given = np.asarray(value)
    with np.errstate(all="ignore"):
        made = given.astype(dtype)
    # Fractions are rounded to a float's digits; integers and bools have to be the same.
    if not (np.isfinite(made) == np.isfinite(given) if made.dtype.kind == "f" else made == given).all():
        raise ValueError(f"{dtype} does not hold it")
    return made[()]
