"""Tables, as Parquet and Arrow files hold them: rows lie in groups, a group is unpacked whole, a row is a sample.

types.py lists what columns may hold. A process caches some unpacked groups, so that neighbouring samples are unpacked
together: `chunk_starts` is where groups begin. Arrays of samples are read-only views of unpacked groups.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.core.per_process import PerProcess
from penstock.data.concat_index import ConcatIndex
from penstock.data.formats.arrow.columns import Column
from penstock.data.formats.arrow.types import Leaf, leaves, merged
from penstock.data.optional import need
from penstock.data.sample_batch import as_slice, put_in_order, samples_of
from penstock.data.schema import Sample, Schema, Selection, plain
from penstock.data.source import Source

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
    return need("pyarrow", "parquet").ArrowException, OSError, ValueError, MemoryError, OverflowError


@dataclass(frozen=True, slots=True)
class Group:
    """A row group, or a record batch."""

    file: int
    number: int
    """In its file."""
    first: int
    """Its first row, in its file."""
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TableOptions:
    """Options that Arrow and Parquet share."""

    null: Mapping[str, Any] = field(default_factory=dict)
    """The value of a field where it is null; else text, bytes and objects are None, and the rest is an error."""
    objects: Sequence[str] = ()
    """Columns that are Python objects whatever their types are."""
    held_nbytes: int = HELD_NBYTES
    max_group_nbytes: int = MOST_GROUP_NBYTES

    def __post_init__(self) -> None:
        if isinstance(self.objects, str):
            raise OptionError(f"objects={self.objects!r} has to be a list of columns, as in [{self.objects!r}]")
        if self.held_nbytes < 0 or self.max_group_nbytes < 1:
            raise OptionError(
                f"held_nbytes={self.held_nbytes} must not be negative, max_group_nbytes={self.max_group_nbytes} not 0"
            )


class TableSource(Source):
    """Rows of tables, by number.

    A format gives `batches`. Groups are unpacked by any thread, and each of them once while it is kept.

    Args:
        paths: of the files.
        groups: of all files, in order.
        schemas: Arrow's, of each file.
        fields: which fields samples have.
        options: see `TableOptions`.

    Raises:
        SourceError: a field is not there, is something else in another file, or cannot be read though it was asked for.
    """

    reads_batches = True

    def __init__(
        self,
        paths: Sequence[str],
        groups: Sequence[Group],
        schemas: Sequence[Any],
        fields: Selection,
        options: TableOptions,
    ) -> None:
        self.where = paths[0] if len(paths) == 1 else f"{paths[0]} and others"
        self._paths = tuple(paths)
        self._groups = tuple(group for group in groups if group.rows)
        rows = [group.rows for group in groups]
        if min(rows, default=0) < 0 or sum(rows) > _MOST_ROWS:
            spans = f"in groups of {min(rows)} to {max(rows)}"
            raise SourceError(f"{self.where}: it states {sum(rows)} rows, {spans}")
        self._schemas = tuple(schemas)
        self._known_leaves: tuple[Any, dict[str, Leaf | str]] = (None, {})
        """Of the schema that was asked for last: in an epoch it mostly is one."""
        self._selection = fields
        self._options = options
        self._names, self._leaves = resolve_fields(self._paths, self._schemas, fields, options.objects)
        self._fields = {name: leaf.field for name, leaf in self._leaves.items()}
        objects = {name for name, field in self._fields.items() if field.kind == "object"}
        self._nulls = {name: value if name in objects else plain(value) for name, value in options.null.items()}
        self._parts = ConcatIndex(group.rows for group in self._groups)
        self._held = PerProcess(partial(GroupCache, options.held_nbytes), GroupCache.clear)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def schema(self) -> Schema:
        """The fields of its samples, as in the files' schemas."""
        return dict(self._fields)

    @property
    def chunk_starts(self) -> np.ndarray:
        """Where each group begins, and the number of rows."""
        return np.asarray(self._parts.starts, np.int64)

    def leaves(self, schema: Any) -> dict[str, Leaf | str]:
        """Return the fields of a file, or of some of its columns; for those that cannot be read, why."""
        known, found = self._known_leaves
        if known is None or not schema.equals(known, check_metadata=True):
            found = leaves(schema, self._options.objects)
            self._known_leaves = schema, found
        return found

    def batches(self, group: Group, names: Iterable[str]) -> Iterator[Any]:
        """Yield a group's record batches, with the columns that hold the fields `names` of the file."""
        raise NotImplementedError

    def cost(self, batch: Any) -> int:
        """Return the bytes that keeping a batch costs."""
        return int(batch.nbytes)

    def offset(self, group: Group) -> int:
        """Return the byte at which a group begins; -1 where nobody knows."""
        return -1

    def read(self, index: int) -> Sample:
        """Return a sample."""
        number, row = self._parts.locate(index)
        unpacked = self._unpacked(number, row)
        piece, within = unpacked.parts.locate(row)
        sample, name = {}, ""
        try:
            for name, column in unpacked.pieces[piece]:
                if column.valid is None or column.valid[within]:
                    sample[name] = column.value(within)
                elif name in self._nulls:
                    sample[name] = self._nulls[name]
                elif self._fields[name].kind in ("text", "bytes", "object"):
                    sample[name] = None
                else:
                    raise SourceError(f"it is null; pass a value to use instead: null={{{name!r}: ...}}")
        except SourceError as error:
            raise self._broken(number, row, f"field {name!r}: {error}") from error
        return sample

    def read_many(self, indices: np.ndarray) -> list[Sample]:
        """Return samples, field by field."""
        found = []
        for number, places, rows in self._parts.split(indices):
            unpacked = self._unpacked(number, int(rows[0]))
            for piece, inner, own in unpacked.parts.split(rows):
                columns = unpacked.pieces[piece]
                there = places if isinstance(inner, slice) else inner if isinstance(places, slice) else places[inner]
                if any(column.valid is not None and not column.valid[own].all() for _, column in columns):
                    samples = [self.read(index) for index in indices[there].tolist()]
                else:
                    run = as_slice(own)
                    values = [column.take(own, run) for _, column in columns]
                    samples = samples_of([name for name, _ in columns], values)
                found.append((there, samples))
        return put_in_order(found, len(indices))

    def ready(self, indices: np.ndarray) -> np.ndarray:
        """Return the samples of groups that are unpacked, and small."""
        held = self._held.get()
        ready = [places for number, places, _ in self._parts.split(indices) if held.has_small_rows(number)]
        return np.concatenate([indices[:0], *(indices[places] for places in ready)])

    def _unpacked(self, number: int, row: int) -> UnpackedGroup:
        unpacked = self._held.get().get(number, self._unpack)
        if unpacked.failure:
            raise self._broken(number, row, unpacked.failure)
        return unpacked

    def select_fields(self, fields: Sequence[str]) -> Source:
        """Return a source with these fields only; others' columns are not read."""
        names = Selection.of(list(fields)).names(self._names, self.where)
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._names = {name: self._names[name] for name in names}
        other._fields = {name: self._fields[name] for name in names}
        other._held = PerProcess(partial(GroupCache, self._options.held_nbytes), GroupCache.clear)
        return other

    def close(self) -> None:
        """Free the groups that this process has cached."""
        self._held.close()

    def _unpack(self, number: int) -> UnpackedGroup:
        """Return a group's columns, or why it cannot be unpacked."""
        group = self._groups[number]
        unpacked = UnpackedGroup()
        try:
            for batch in self.batches(group, self._names.values()):
                self._add(batch, unpacked)
        except SourceError as error:
            return UnpackedGroup(failure=str(error))
        except arrow_errors() as error:
            if getattr(error, "errno", None):  # the disk's, and may be gone the next time
                raise SourceError(f"{self._paths[group.file]} cannot be read: {error}") from error
            return UnpackedGroup(failure=f"its group cannot be unpacked: {str(error)[:500]}")
        if len(unpacked.parts) != group.rows:
            reason = f"its group has {len(unpacked.parts)} rows, and {group.rows} in the file's metadata"
            return UnpackedGroup(failure=reason)
        return unpacked

    def _add(self, batch: Any, unpacked: UnpackedGroup) -> None:
        if not batch.num_rows:
            return
        there = self.leaves(batch.schema)
        columns = []
        for name, inner in self._names.items():
            leaf = there.get(inner)
            if leaf is not None and not isinstance(leaf, str) and leaf.field != self._fields[name]:
                wide = merged(leaf, self._leaves[name])
                leaf = wide if wide is not None and wide.field == self._fields[name] else None
            if leaf is None or isinstance(leaf, str):
                raise SourceError(f"its column {inner!r} is not of the type in the file's schema")
            try:
                columns.append((name, leaf.column(batch)))
            except SourceError as error:
                raise SourceError(f"field {name!r}: {error}") from error
        unpacked.pieces.append(columns)
        unpacked.parts.starts.append(len(unpacked.parts) + batch.num_rows)
        unpacked.nbytes += self.cost(batch)
        if unpacked.nbytes > self._options.max_group_nbytes:
            raise SourceError(
                f"its group has {unpacked.nbytes} bytes and more unpacked; max_group_nbytes is "
                f"{self._options.max_group_nbytes}"
            )

    def _broken(self, number: int, row: int, reason: str) -> RecordError:
        group = self._groups[number]
        return RecordError(self._paths[group.file], self.offset(group), group.first + row, reason)


def resolve_fields(
    paths: Sequence[str], schemas: Sequence[Any], fields: Selection, objects: Sequence[str] = ()
) -> tuple[dict[str, str], dict[str, Leaf]]:
    """Return {name in the sample: name in the files} and the fields, in units that hold those of all files.

    Warns of fields that cannot be read, and are left out as nobody asked for them by name.

    Raises:
        SourceError: a field is not there, is something else in another file, or cannot be read though it was asked for.
    """
    first: dict[str, str] | None = None
    found: dict[str, Leaf] = {}
    unread: dict[str, str] = {}
    for path, schema in zip(paths, schemas, strict=True):
        with translate_errors(path):
            there = leaves(schema, objects)
            Selection.of(list(objects)).names(there, path)
        names = fields.names(there, path)
        if first is None:
            first = names
        if names.keys() != first.keys():
            raise SourceError(f"{path}: it has the fields {sorted(names)}, and {paths[0]} {sorted(first)}")
        for name, inner in names.items():
            leaf = there[inner]
            if isinstance(leaf, str):
                unread.setdefault(name, f"{path}: field {inner!r} cannot be read: {leaf}")
            else:
                found[name] = _merged(found.get(name, leaf), leaf, path, paths[0])
    readable = {name: inner for name, inner in (first or {}).items() if name not in unread}
    if unread and (fields.chosen is not None or not readable):
        raise SourceError(f"{next(iter(unread.values()))}; leave it out: fields=")
    for why in unread.values():
        warnings.warn(f"left out: {why}", stacklevel=2)
    return readable, {name: found[name] for name in readable}


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
    pieces: list[list[tuple[str, Column]]] = field(default_factory=list)
    nbytes: int = 0
    failure: str = ""
    """Why there are none."""


class GroupCache:
    """UnpackedGroup groups: the least recently used go when `most_nbytes` are exceeded; one is always kept."""

    def __init__(self, most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._groups: OrderedDict[int, UnpackedGroup] = OrderedDict()
        self._nbytes = 0
        self._turns: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, number: int, unpack: Callable[[int], UnpackedGroup]) -> UnpackedGroup:
        """Return group `number`; one thread unpacks it, and others that ask for it wait."""
        with self._lock:
            found = self._groups.get(number)
            if found is not None:
                self._groups.move_to_end(number)
                return found
            turn = self._turns.setdefault(number, threading.Lock())
        with turn:
            found = self._groups.get(number)
            if found is None:
                found = unpack(number)
                self._keep(number, found)
            return found

    def has_small_rows(self, number: int) -> bool:
        """Return whether group `number` is there, and its rows are small."""
        found = self._groups.get(number)
        return found is not None and found.nbytes <= _SMALL_NBYTES * len(found.parts)

    def clear(self) -> None:
        """Free all groups."""
        with self._lock:
            self._groups.clear()
            self._nbytes = 0

    def _keep(self, number: int, unpacked: UnpackedGroup) -> None:
        with self._lock:
            self._turns.pop(number, None)
            if number in self._groups:
                self._nbytes -= self._groups.pop(number).nbytes
            self._groups[number] = unpacked
            self._nbytes += unpacked.nbytes
            while self._nbytes > self._most_nbytes and len(self._groups) > 1:
                _, old = self._groups.popitem(last=False)
                self._nbytes -= old.nbytes
