"""Samples whose fields are columns of files, which are read chunk by chunk: datasets of HDF5, arrays of Zarr."""

from __future__ import annotations

import base64
import copy
import math
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.core.per_process import PerProcess
from penstock.data.formats.chunked_rows import RaggedValues, Values, Wanted
from penstock.data.rows import ChunkCache, ConcatIndex
from penstock.data.sample_batch import as_slice, put_in_order, samples_of
from penstock.data.schema import Field, Sample, Schema, common_dtype
from penstock.data.source import Source

_SMALL_NBYTES = 64 << 10
"""Samples up to this are gathered, a batch of them at a time; larger ones are copied as they are made."""

_SPAN_NBYTES = 1 << 19
"""Of rows in order that are read by one call, where nothing has to be unpacked: a sixth faster than twice as many."""

_MAX_RUNS = 1 << 24
_MAX_OPEN = 128
_STATED = "units", "calendar", "scale_factor", "add_offset", "_Unsigned"


@dataclass(frozen=True, kw_only=True, eq=False)
class ArrayLayout:
    """Where the rows of one array lie. Can be pickled."""

    name: str
    """Its path in the file."""

    count: int
    shape: tuple[int, ...]
    """Of a row."""

    dtype: Any
    """As the elements lie in the file."""

    chunk: tuple[int, ...]
    """The shape of what is read together."""

    is_in_place = False
    """Whether rows are ranges of the file, and nothing has to be unpacked."""

    is_one_by_one = False
    """Whether rows are no faster when many are read together."""

    @property
    def row_nbytes(self) -> int:
        """The bytes of a row; those of the reference, where its length varies."""
        return math.prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """One field of one file. Can be pickled."""

    array: ArrayLayout
    """What holds it; the elements, if it is ragged, and all parts of a compound have the same."""

    field: Field
    count: int
    object_nbytes: int = 0
    """The most that objects take to which the rows refer."""

    open: Callable[[Any, ChunkCache[Any]], Values | RaggedValues]
    """Given the file as a process has it open, and a cache for chunks, returns what reads the values."""

    @property
    def nbytes(self) -> int:
        """All bytes of the array."""
        return self.array.count * self.array.row_nbytes

    @property
    def chunk_nbytes(self) -> int:
        """The bytes that are unpacked together; 0 where none have to be."""
        return 0 if self.array.is_in_place else self.array.chunk[0] * self.array.row_nbytes

    @property
    def is_small(self) -> bool:
        """Whether many values are read faster together."""
        return not self.array.is_one_by_one and self.nbytes + self.object_nbytes <= _SMALL_NBYTES * self.count


@dataclass(frozen=True, kw_only=True, eq=False)
class FileColumns:
    """The columns of one file, by the names that samples have. Can be pickled."""

    path: str
    columns: Mapping[str, Column]
    nbytes: int = 0
    """Of the file; 0 for a folder."""

    @property
    def count(self) -> int:
        """How many samples there are."""
        return next((column.count for column in self.columns.values()), 0)


class OpenFiles:
    """The files of a `ColumnSource` that one process has open: those used last, as each takes a descriptor or two."""

    def __init__(
        self, files: Sequence[FileColumns], open_file: Callable[[FileColumns], Any], cache_nbytes: int
    ) -> None:
        self._files, self._open_file = files, open_file
        caches: dict[str, ChunkCache[Any]] = {}
        for name, column in files[0].columns.items():
            largest = max(file.columns[name].chunk_nbytes for file in files)
            caches.setdefault(column.array.name, ChunkCache(largest, cache_nbytes))
        self._caches = {name: caches[column.array.name] for name, column in files[0].columns.items()}
        self._lock = threading.Lock()
        self._open: OrderedDict[int, dict[str, Values | RaggedValues]] = OrderedDict()

    def values(self, number: int) -> dict[str, Values | RaggedValues]:
        """Return what reads the fields of file `number`."""
        found = self._open.get(number)
        if found is not None and len(self._files) <= _MAX_OPEN:
            return found
        with self._lock:
            found = self._open.get(number)
            if found is None:
                info = self._files[number]
                file = self._open_file(info)
                found = {name: column.open(file, self._caches[name]) for name, column in info.columns.items()}
                self._open[number] = found
                if len(self._open) > _MAX_OPEN:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(number)
            return found

    def close(self) -> None:
        """Let go of all."""
        self._open.clear()


class ColumnSource(Source):
    """Samples of files, by number.

    Args:
        files: their columns. Numbers of different types are read in one that holds those of all files exactly.
        open_file: opens one in each process that reads it. It is closed when nothing refers to it.
        cache_nbytes: the most that unpacked chunks of one field take, in each process.

    Raises:
        SourceError: the files have different fields.
    """

    def __init__(
        self, files: Sequence[FileColumns], open_file: Callable[[FileColumns], Any], cache_nbytes: int
    ) -> None:
        self.where = files[0].path if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more"
        self._schema = _common(files)
        self._files = files
        self._parts = ConcatIndex(file.count for file in files)
        self._reading = PerProcess(partial(OpenFiles, files, open_file, cache_nbytes), OpenFiles.close)

    def __len__(self) -> int:
        return len(self._parts)

    def read_paths(self) -> Sequence[str]:
        """Return the files that samples are read from."""
        return [file.path for file in self._files]

    def path_of(self, index: int) -> str:
        """Return the path of the file that has it."""
        return self._files[self._parts.locate(index)[0]].path

    def read(self, index: int) -> Sample:
        """Return a sample."""
        number, own = self._parts.locate(index)
        columns = self._take(number, slice(own, own + 1))
        return {name: column[0] for name, column in zip(self._schema, columns, strict=True)}

    def _take(self, number: int, wanted: Wanted) -> list[Sequence[Any] | np.ndarray]:
        """Return samples of a file as columns, numbers in the types that the schema has."""
        values, columns, found = self._reading.get().values(number), self._files[number].columns, []
        for name, field in self._schema.items():
            own = values[name].take(wanted)
            is_same = columns[name].field.dtype == field.dtype
            found.append(own if is_same else _widened(own, field.dtype))
        return found

    @property
    def reads_batches(self) -> bool:  # type: ignore[override]
        """Whether all fields are small."""
        return all(file.columns[name].is_small for file in self._files for name in self._schema)

    def read_many(self, indices: np.ndarray) -> list[Sample]:
        """Return samples, field by field."""
        found = []
        for number, places, own in self._parts.split(indices):
            run = as_slice(own)
            found.append((places, samples_of([*self._schema], self._take(number, own if run is None else run))))
        return put_in_order(found, len(indices))

    def ready(self, indices: np.ndarray) -> np.ndarray:
        """Return the samples if no library has to unpack a chunk of them."""
        for number, _, own in self._parts.split(indices):
            values = self._reading.get().values(number)
            if not all(values[name].holds(own) for name in self._schema):
                return indices[:0]
        return indices

    def read_range(self, start: int, stop: int) -> list[Sample]:
        """Return samples in order, up to where a chunk ends, if one ends before `stop`."""
        number, own = self._parts.locate(start)
        largest = max((self._files[number].columns[name] for name in self._schema), key=lambda column: column.nbytes)
        rows, end = largest.array.chunk[0], min(own + stop - start, self._files[number].count)
        if largest.array.count == largest.count:  # not ragged
            if largest.array.is_in_place:
                end = min(end, own + max(1, _SPAN_NBYTES // max(1, largest.array.row_nbytes)))
            if 1 < rows <= end - own:
                end = end // rows * rows
        return samples_of([*self._schema], self._take(number, slice(own, end)))

    @property
    def schema(self) -> Schema:
        """The fields of every sample."""
        return dict(self._schema)

    @property
    def chunk_starts(self) -> np.ndarray | None:
        """Where the chunks of the largest field begin; None where nothing has to be unpacked."""
        name = max(self._schema, key=lambda name: max(file.columns[name].nbytes for file in self._files))
        columns = [file.columns[name] for file in self._files]
        if all(not column.chunk_nbytes or column.array.chunk[0] == 1 for column in columns):
            return None
        if sum(column.array.count // column.array.chunk[0] for column in columns) > _MAX_RUNS:
            return None
        starts = [
            self._parts.starts[number] + self._starts(number, name, column) for number, column in enumerate(columns)
        ]
        return np.append(np.concatenate(starts), len(self))

    def _starts(self, number: int, name: str, column: Column) -> np.ndarray:
        chunks = np.arange(0, column.array.count, column.array.chunk[0])
        values = self._reading.get().values(number)[name]
        if not isinstance(values, RaggedValues):
            return chunks
        cuts = np.searchsorted(values.all_starts(), chunks)
        return np.unique(np.append(0, cuts[cuts < column.count])) if column.count else cuts[:0]

    def select_fields(self, fields: Sequence[str]) -> ColumnSource:
        """Return a source with these fields only; the others' bytes are not read. Both close together."""
        narrow = copy.copy(self)
        narrow._schema = {name: self._schema[name] for name in fields}
        return narrow

    def close(self) -> None:
        """Close this process's files; they are opened again when they are needed."""
        self._reading.close()


def stated_field(field: Field, attributes: Mapping[str, Any]) -> Field:
    """Return the field of an array of numbers with what its attributes say of them, in netCDF's conventions.

    Integers whose `_Unsigned` is "true" are unsigned, as netCDF4-python reads them: netCDF-3 has no such types. What is
    missing is `_FillValue`, or without it what older files say, `missing_value`.

    >>> stated_field(Field("number", "int8"), {"units": b"K", "scale_factor": np.array([0.5]), "title": "t"}).words()
    'int8 (units=K, scale_factor=0.5)'
    >>> stated_field(Field("array", ">i2", (3,)), {"_Unsigned": "true", "_FillValue": np.int16(-1)}).words()
    'uint16[3] (_FillValue=65535, _Unsigned=true)'
    """
    fill = "_FillValue" if "_FillValue" in attributes else "missing_value"
    stated = {name: _stated(attributes[name]) for name in (*_STATED, fill) if name in attributes}
    is_unsigned = str(stated.pop("_Unsigned", "")).lower() == "true"
    dtype = np.dtype(field.dtype)
    if dtype.kind == "i" and is_unsigned:
        field = replace(field, dtype=f"uint{8 * dtype.itemsize}")
        if isinstance(stated.get(fill), int):
            stated[fill] %= 1 << 8 * dtype.itemsize
        stated["_Unsigned"] = "true"
    if dtype.kind == "f" and fill in stated:
        stated[fill] = _float(stated[fill])
        if stated[fill] != stated[fill]:  # a NaN is missing whatever the file says
            del stated[fill]
    return replace(field, unit=", ".join(f"{name}={str(value)[:200]}" for name, value in stated.items()))


def _stated(value: Any) -> Any:
    first = next(iter(np.asarray(value).reshape(-1)[:1].tolist()), "")
    if isinstance(first, str):  # h5py gives surrogates for what is no UTF-8
        first = first.encode(errors="replace")
    return first.decode(errors="replace") if isinstance(first, bytes) else first


def _float(value: Any) -> Any:
    """Return a float that xarray stated in JSON as the base64 of its eight bytes."""
    if isinstance(value, str):
        with suppress(ValueError, struct.error):
            return struct.unpack("<d", base64.b64decode(value, validate=True))[0]
    return value


def _common(files: Sequence[FileColumns]) -> Schema:
    first, *others = ({name: column.field for name, column in file.columns.items()} for file in files)
    common = dict(first)
    for file, schema in zip(files[1:], others, strict=True):
        if schema.keys() != common.keys():
            words = {name: field.words() for name, field in schema.items()}
            raise SourceError(
                f"{file.path} has the fields {words}, and {files[0].path} has {sorted(common)}; choose with fields= "
                "what both have"
            )
        for name, field in schema.items():
            old = common[name]
            wide = common_dtype(old.dtype, field.dtype) if old.dtype and field.dtype else ""
            if replace(old, dtype=wide, shape=()) != replace(field, dtype=wide, shape=()) or (
                len(old.shape) != len(field.shape) or (not wide and old.dtype != field.dtype)
            ):
                raise SourceError(
                    f"field {name!r} of {file.path} is {field.words()}, and that of {files[0].path} {old.words()}; "
                    "files that are opened together need the same, or one type that holds both exactly"
                )
            sizes = (one if one == other else None for one, other in zip(old.shape, field.shape, strict=True))
            common[name] = replace(old, dtype=wide, shape=tuple(sizes))
    return common


def _widened(values: Sequence[Any] | np.ndarray, dtype: str) -> Sequence[Any] | np.ndarray:
    return values.astype(dtype) if isinstance(values, np.ndarray) else [one.astype(dtype) for one in values]
