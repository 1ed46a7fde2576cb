"""Zarr: the arrays of a group are the fields of its samples, and their rows are the samples. Versions 2 and 3.

fields      arrays of numbers, and of strings and bytes of one dimension, that have as many rows as the largest one;
            an array that is not in a group is the field "array"
reading     by the zarr package, chunk (or shard) by chunk; a chunk is unpacked once and kept a while
chunk_starts   those of the largest field
ZarrWriter      version 3, chunks of about 1 MiB. Arrays and numbers are arrays, text is an array of strings. Bytes, and
            arrays whose shapes differ, are a group with the attribute "penstock_ragged", {"kind", "shape" with -1
            where they differ}, and in it
                values     the elements of all, one after another
                offsets    int64 (samples,): where each begins in `values`
                shapes     int64 (samples, dimensions)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from penstock.core.errors import RecordError, SourceError
from penstock.core.per_process import PerProcess
from penstock.data.chunks.chunk_cache import ChunkCache
from penstock.data.concat_index import ConcatIndex
from penstock.data.formats.zarr.writer import ERRORS, RAGGED
from penstock.data.optional import need
from penstock.data.sample_batch import as_slice, put_in_order, samples_of
from penstock.data.schema import Errors, Field, Sample, Schema, Selection
from penstock.data.source import Source
from penstock.data.storage.storage import Storage, is_remote

_NUMBERS = "biufc"
_MOST_RUNS = 1 << 24
_SMALL_NBYTES = 64 << 10


def open_files(
    paths: list[str],
    storage: Storage,
    fields: Selection,
    errors: Errors,
    *,
    max_record_nbytes: int = 1 << 30,
    chunk_cache_nbytes: int = 256 << 20,
) -> ZarrSource:
    """Open Zarr groups.

    Args:
        paths: of the groups: folders, or URLs.
        storage: expands paths; the zarr package itself reads from URLs.
        fields: which arrays; by default all that have as many rows as the largest one.
        errors: unused: reading a broken sample raises RecordError.
        max_record_nbytes: larger rows of chunks are refused.
        chunk_cache_nbytes: the most that unpacked chunks of one field take, in each process.

    Raises:
        SourceError: there is no such group, it is broken, or its arrays cannot be fields.
        ExtraError: the zarr package is not installed.

    Example:
        >>> import tempfile
        >>> from penstock.data.formats.zarr.writer import ZarrWriter
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = ZarrWriter(f"{folder}/a.zarr", {"x": Field("array", "float32", (2,))})
        ...     writer.write({"x": np.ones(2, np.float32)})
        ...     writer.close()
        ...     open_files([f"{folder}/a.zarr"], storage=Storage(), fields=Selection(), errors="raise")[0]
        {'x': array([1., 1.], dtype=float32)}
    """
    local = [path if is_remote(path) else storage.local(path) for path in paths]
    return ZarrSource([_probe_group(path, fields, max_record_nbytes) for path in local], chunk_cache_nbytes)


@dataclass(frozen=True, kw_only=True)
class Column:
    """One field of one group."""

    name: str
    """Of its array, or its group if it is ragged; "" for an array that is not in a group."""

    field: Field
    count: int
    rows: int
    """Of the array (of the elements, if it is ragged) that lie in one row of chunks."""

    row_nbytes: int
    is_ragged: bool = False

    @property
    def is_small(self) -> bool:
        """Whether many values are read faster together."""
        return not self.is_ragged and self.field.kind in ("array", "number") and self.row_nbytes <= _SMALL_NBYTES


@dataclass(frozen=True, kw_only=True)
class GroupInfo:
    """What was found in one group."""

    path: str
    columns: dict[str, Column]

    @property
    def count(self) -> int:
        """How many samples there are."""
        return next(iter(self.columns.values())).count


class ZarrSource(Source):
    """Samples of Zarr groups, by number.

    Args:
        groups: what was found in them.
        chunk_cache_nbytes: the most that unpacked chunks of one field take.

    Raises:
        SourceError: the groups have different fields.
    """

    def __init__(self, groups: Sequence[GroupInfo], chunk_cache_nbytes: int) -> None:
        self.where = groups[0].path if len(groups) == 1 else f"{groups[0].path} and {len(groups) - 1} more"
        self._groups = list(groups)
        self._schema = {name: column.field for name, column in groups[0].columns.items()}
        for group in groups[1:]:
            if {name: column.field for name, column in group.columns.items()} != self._schema:
                raise SourceError(f"{group.path} has other fields than {groups[0].path}")
        self._parts = ConcatIndex(group.count for group in groups)
        self._reading = PerProcess(partial(_OpenGroups, self._groups, chunk_cache_nbytes), _OpenGroups.close)

    def __len__(self) -> int:
        return len(self._parts)

    def read(self, index: int) -> Sample:
        """Return a sample.

        Raises:
            RecordError: it is broken.
        """
        number, own = self._parts.locate(index)
        reading = self._reading.get()
        return {name: reading.value(number, name, own) for name in self._schema}

    @property
    def reads_batches(self) -> bool:  # type: ignore[override]
        """Whether all fields are small, and numbers."""
        columns = (group.columns[name] for group in self._groups for name in self._schema)
        return all(column.is_small for column in columns)

    def read_many(self, indices: np.ndarray) -> list[Sample]:
        """Return samples, field by field."""
        found = []
        for number, places, own in self._parts.split(indices):
            reading = self._reading.get()
            columns = [reading.take(number, name, own) for name in self._schema]
            found.append((places, samples_of([*self._schema], columns)))
        return put_in_order(found, len(indices))

    def ready(self, indices: np.ndarray) -> np.ndarray:
        """Return the samples if all their chunks are held."""
        reading = self._reading.get()
        parts = self._parts.split(indices)
        is_held = all(reading.holds(number, name, own) for number, _, own in parts for name in self._schema)
        return indices if is_held else indices[:0]

    @property
    def schema(self) -> Schema:
        """The fields of every sample."""
        return dict(self._schema)

    @property
    def chunk_starts(self) -> np.ndarray | None:
        """Where the chunks of the largest field begin; None where rows have chunks of their own."""
        first = self._groups[0].columns
        name = max(self._schema, key=lambda name: (not first[name].is_ragged) * first[name].row_nbytes)
        columns = [group.columns[name] for group in self._groups]
        count = sum(column.count // column.rows for column in columns)
        if all(column.rows == 1 or column.is_ragged for column in columns) or count > _MOST_RUNS:
            return None
        starts = [
            first + np.arange(0, column.count, column.rows)
            for column, first in zip(columns, self._parts.starts[:-1], strict=True)
        ]
        return np.append(np.concatenate(starts), len(self))

    def select_fields(self, fields: Sequence[str]) -> ZarrSource:
        """Return a source with these fields only; the others' chunks are not read. Both close together."""
        narrow = copy.copy(self)
        narrow._schema = {name: self._schema[name] for name in fields}
        return narrow

    def close(self) -> None:
        """Forget this process's arrays and chunks."""
        self._reading.close()


class _OpenGroups:
    """The groups that one process has open. Any thread may read: the zarr package reads in its own thread."""

    def __init__(self, groups: list[GroupInfo], chunk_cache_nbytes: int) -> None:
        self._groups = groups
        self._open: dict[int, Any] = {}
        self._arrays: dict[tuple[int, str], Any] = {}
        self._chunks: dict[str, ChunkCache[np.ndarray]] = {
            name: ChunkCache(column.rows * column.row_nbytes, chunk_cache_nbytes)
            for name, column in groups[0].columns.items()
        }

    def value(self, number: int, name: str, index: int) -> Any:
        column = self._groups[number].columns[name]
        if not column.is_ragged:
            row = self._rows(number, name, column.name, index, index + 1)[0]
            return _as_field(row, column.field, self._groups[number].path, f"{name}[{index}]")
        start = int(self._rows(number, name, f"{column.name}/offsets", index, index + 1)[0])
        shape = tuple(self._rows(number, name, f"{column.name}/shapes", index, index + 1)[0].tolist())
        total = self._array(number, f"{column.name}/values").shape[0]
        stop = start + math.prod(shape)
        wide = column.field.shape if column.field.kind == "array" else (None,)
        fits = all(size >= 0 and other in (None, size) for size, other in zip(shape, wide, strict=True))
        if not fits or not 0 <= start <= stop <= total:
            raise RecordError(
                self._groups[number].path, -1, f"{name}[{index}]", f"elements {start} to {stop} of {total}, as {shape}"
            )
        value = self._rows(number, name, f"{column.name}/values", start, stop).reshape(shape)
        return value.tobytes() if column.field.kind == "bytes" else value

    def take(self, number: int, name: str, indices: np.ndarray) -> np.ndarray:
        """Return values of a field that is small, in any order."""
        column = self._groups[number].columns[name]
        run = as_slice(indices)
        if run is not None:
            values = self._rows(number, name, column.name, run.start, run.stop)
        else:
            cuts = np.unique(indices // column.rows).tolist()
            array = self._array(number, column.name)
            values = np.empty((len(indices), *array.shape[1:]), array.dtype)
            for at in cuts:
                places = np.flatnonzero(indices // column.rows == at)
                start, stop = int(indices[places].min()), int(indices[places].max()) + 1
                values[places] = self._rows(number, name, column.name, start, stop)[indices[places] - start]
        return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))

    def holds(self, number: int, name: str, indices: np.ndarray) -> bool:
        """Return whether the chunks of some values are held."""
        column = self._groups[number].columns[name]
        chunks = np.unique(indices // column.rows).tolist()
        return all(self._chunks[name].peek((number, column.name, at)) is not None for at in chunks)

    def _array(self, number: int, name: str) -> Any:
        found = self._arrays.get((number, name))
        if found is None:
            if number not in self._open:
                self._open[number] = _open_group(self._groups[number].path)
            found = self._arrays[number, name] = self._open[number][name] if name else self._open[number]
        return found

    def _rows(self, number: int, field: str, name: str, start: int, stop: int) -> np.ndarray:
        """Return a copy of some rows, as they must not keep their chunk alive."""
        try:
            array = self._array(number, name)
            rows = _rows_per_chunk(array)
            parts = []
            for at in range(start // rows, -(-stop // rows)):
                chunk = self._chunks[field].get((number, name, at), partial(_chunk, array, at * rows, rows))
                parts.append(chunk[max(0, start - at * rows) : stop - at * rows])
            if len(parts) == 1:
                return parts[0].copy()
            return np.concatenate(parts) if parts else np.empty((0, *array.shape[1:]), array.dtype)
        except ERRORS as error:
            raise RecordError(
                self._groups[number].path, -1, f"{name}[{start}]", f"zarr raised {type(error).__name__}: {error}"
            ) from error

    def close(self) -> None:
        self._arrays.clear()
        self._open.clear()


def _chunk(array: Any, start: int, rows: int) -> np.ndarray:
    return np.asarray(array[start : start + rows])


def _rows_per_chunk(array: Any) -> int:
    return int((array.shards or array.chunks)[0])


def _as_field(value: Any, field: Field, path: str, key: str) -> Any:
    if field.kind == "bytes":
        return bytes(value)
    if field.kind == "text":
        try:
            return value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError as error:
            raise RecordError(path, -1, key, f"its text is not UTF-8: {error}") from error
    return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))


# ── what is there ───────────────────────────────────────────────────────────────────────────────────────────


_FILE_SYSTEMS: set[Any] = set()
"""Of remote groups. A forked child must not finalize what its parent has open: aiohttp complains."""


def _open_group(path: str) -> Any:
    root = need("zarr", "zarr").open(path, mode="r")
    if is_remote(path):
        _FILE_SYSTEMS.add(root.store.fs)
    return root


def _probe_group(path: str, fields: Selection, most_nbytes: int) -> GroupInfo:
    zarr = need("zarr", "zarr")
    try:
        root = _open_group(path)
        there = {"array": ("", root)} if isinstance(root, zarr.Array) else _list_arrays(root)
        found = fields.names(_of_one_length(there) if fields.chosen is None else there, path)
        columns = {new: _column(path, *there[own], most_nbytes) for new, own in found.items()}
    except SourceError:
        raise
    except ERRORS as error:
        raise SourceError(f"{path} cannot be read as Zarr: {type(error).__name__}: {error}") from error
    if not columns:
        raise SourceError(f"{path} has no arrays with rows")
    if len({column.count for column in columns.values()}) > 1:
        counts = ", ".join(f"{name!r} has {column.count}" for name, column in columns.items())
        raise SourceError(f"{path}: the fields of samples need one number of rows; {counts}")
    return GroupInfo(path=path, columns=columns)


def _list_arrays(group: Any, prefix: str = "") -> dict[str, tuple[str, Any]]:
    """Return arrays, and groups of ragged ones, by name: each with its path."""
    found = {f"{prefix}{name}": (f"{prefix}{name}", array) for name, array in sorted(group.arrays()) if array.shape}
    for name, inner in sorted(group.groups()):
        if RAGGED in inner.attrs:
            found[f"{prefix}{name}"] = (f"{prefix}{name}", inner)
        else:
            found |= _list_arrays(inner, f"{prefix}{name}/")
    return found


def _of_one_length(there: dict[str, tuple[str, Any]]) -> dict[str, Any]:
    largest = max(((_nbytes(one), _count(one)) for _, one in there.values()), default=(0, 0))[1]
    return {name: one for name, (_, one) in there.items() if _count(one) == largest}


def _count(one: Any) -> int:
    return int((one["offsets"] if RAGGED in one.attrs else one).shape[0])


def _nbytes(one: Any) -> int:
    array = one["values"] if RAGGED in one.attrs else one
    return int(math.prod(array.shape) * array.dtype.itemsize)


def _column(path: str, name: str, one: Any, most_nbytes: int) -> Column:
    is_ragged = RAGGED in one.attrs
    array = one["values"] if is_ragged else one
    row_nbytes = math.prod(array.shape[1:]) * int(array.dtype.itemsize)
    if row_nbytes * _rows_per_chunk(array) > most_nbytes:
        chunk_nbytes = row_nbytes * _rows_per_chunk(array)
        raise SourceError(
            f"{path}: chunks of array {name!r} are {chunk_nbytes} bytes for all columns; {most_nbytes} are the most; "
            "raise max_record_nbytes if that is right"
        )
    field = _ragged_field(path, name, one) if is_ragged else _field(array, f"{path}: array {name!r}")
    return Column(
        name=name,
        field=field,
        count=_count(one),
        rows=_rows_per_chunk(array),
        row_nbytes=row_nbytes,
        is_ragged=is_ragged,
    )


def _ragged_field(path: str, name: str, group: Any) -> Field:
    attributes, values, shapes, offsets = group.attrs[RAGGED], group["values"], group["shapes"], group["offsets"]
    sizes = tuple(None if size < 0 else int(size) for size in attributes["shape"])
    whole = np.dtype(np.int64)
    if (
        attributes["kind"] not in ("array", "bytes")
        or (values.ndim, offsets.ndim) != (1, 1)
        or values.dtype.kind not in _NUMBERS
        or (offsets.dtype, shapes.dtype) != (whole, whole)
        or shapes.shape != (offsets.shape[0], len(sizes))
    ):
        raise SourceError(f"{path}: {name!r} is no group of ragged arrays: {dict(group.attrs)}")
    return Field("bytes") if attributes["kind"] == "bytes" else Field("array", values.dtype.name, sizes)


def _field(array: Any, where: str) -> Field:
    dtype, shape = array.dtype, tuple(array.shape[1:])
    if dtype.kind in _NUMBERS:
        name = dtype.newbyteorder("=").name
        return Field("array", name, shape) if shape else Field("number", name)
    if shape or dtype.kind not in "TUSO":
        raise SourceError(f"{where} holds {dtype} of shape {shape} in each sample, which no field can hold")
    return Field("bytes" if dtype.kind == "O" else "text")
