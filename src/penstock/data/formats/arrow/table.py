"""Tables, as Parquet and Arrow files hold them: which columns are fields, in which types, and rows of record batches.

types.py lists what columns may hold. Arrays of samples are read-only views of unpacked groups.

Hive partitions are columns in the names of folders, as in year=2026/label=cat/a.parquet, and not in the files. They are
read where they are asked for, as int64 if all values are integers, else as text; `__HIVE_DEFAULT_PARTITION__` is null.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import OptionError, SourceError
from penstock.data.formats.arrow.types import UNTYPED, Leaf, leaves, merged
from penstock.data.formats.partition_names import check_left_out, partition_values
from penstock.data.optional import need
from penstock.data.rows import HELD_NBYTES, MOST_GROUP_NBYTES, Column, RowFile, RowSource, translate_errors
from penstock.data.schema import Errors, Selection
from penstock.data.storage.storage import Storage

_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?\d{1,18}")


def translate_arrow_errors(path: str, what: str = "it cannot be read") -> AbstractContextManager[None]:
    """Raise SourceError for whatever Arrow raises about a file."""
    return translate_errors(f"{path}: {what}", arrow_errors())


def arrow_errors() -> tuple[type[Exception], ...]:
    """Return what Arrow raises about damaged files."""
    return need("pyarrow", "parquet").ArrowException, OSError, ValueError, MemoryError, OverflowError, LookupError


class TableSource(RowSource):
    """Rows of Parquet or Arrow files, one after another, by number.

    A format gives `scan` and `batches`.

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
        groups, schemas = zip(*self.scan(paths, storage, max_record_nbytes), strict=True)
        there = {*schemas[0].names, *partitions}
        check_left_out(paths, lambda: there, fields, "pass partitions={} to read it")
        self._leaves = resolve_fields(paths, schemas, fields, objects, partitions)
        schema = {name: leaf.field for name, leaf in self._leaves[0].items()}
        files = [RowFile(path, schema, own) for path, own in zip(paths, groups, strict=True)]
        super().__init__(files, null=null, held_nbytes=held_nbytes, max_record_nbytes=max_record_nbytes)

    def scan(
        self, paths: Sequence[str], storage: Storage, max_record_nbytes: int
    ) -> Iterable[tuple[Sequence[int], Any]]:
        """Yield the rows of each group of a file, and Arrow's schema, for each file."""
        raise NotImplementedError

    def batches(self, file: int, group: int, columns: Sequence[tuple[str, ...]]) -> Iterator[tuple[Any, int]]:
        """Yield the record batches of a group of a file, with these columns at least, and what keeping each costs."""
        raise NotImplementedError

    @property
    def unpack_errors(self) -> tuple[type[Exception], ...]:  # type: ignore[override]
        """What Arrow raises; it is imported where it is needed."""
        return arrow_errors()

    def read_group(self, file: int, group: int, names: Sequence[str]) -> Iterator[tuple[int, list[Column], int]]:
        """Yield the rows of the group's record batches, their columns, and the bytes that these take."""
        wanted = {name: self._leaves[file][name] for name in names}
        paths = [leaf.path for leaf in wanted.values() if not isinstance(leaf, PartitionLeaf)]
        for batch, nbytes in self.batches(file, group, paths):
            rows = batch.num_rows
            yield rows, [_column(name, leaf, batch) for name, leaf in wanted.items()] if rows else [], nbytes


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
    with translate_arrow_errors(path):
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


@dataclass(frozen=True, slots=True)
class PartitionLeaf(Leaf):
    """A field that has one value in all rows of a file."""

    value: int | str | None = None

    def column(self, batch: Any) -> Column:
        """Return the value as often as a record batch has rows."""
        pa = need("pyarrow", "parquet")
        return self.make(pa.repeat(pa.scalar(self.value, self.type), batch.num_rows))


def partition_leaves(paths: Sequence[str], names: Iterable[str]) -> list[dict[str, PartitionLeaf]]:
    """Return the fields of each file that are the partitions `names`.

    Raises:
        SourceError: a file is in no folder that states one.
    """
    pa, values = need("pyarrow", "parquet"), [partition_values(path) for path in paths]
    found: list[dict[str, PartitionLeaf]] = [{} for _ in paths]
    for name in names:
        for path, stated in zip(paths, values, strict=True):
            if name not in stated:
                known = ", ".join(map(repr, stated)) or "none"
                raise SourceError(f"{path}: partitions= names {name!r}, and its folders state {known}")
        texts = [None if stated[name] == _NULL else stated[name] for stated in values]
        is_number = {*texts} != {None} and all(_INTEGER.fullmatch(text) for text in texts if text is not None)
        leaf = leaves(pa.schema([(name, pa.int64() if is_number else pa.string())]))[name]
        assert isinstance(leaf, Leaf)
        for own, text in zip(found, texts, strict=True):
            value = int(text) if is_number and text is not None else text
            own[name] = PartitionLeaf(leaf.field, leaf.path, leaf.make, leaf.type, value)
    return found
