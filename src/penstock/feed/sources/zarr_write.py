"""Writes samples to a Zarr group of version 3; the layout is described in `zarr`."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from penstock.core.errors import SourceError
from penstock.feed.sources.extras import need
from penstock.feed.sources.sample import Field, Sample, Schema, field_of, plain

RAGGED = "penstock_ragged"
"""The attribute of a group that holds bytes, or arrays whose shapes differ."""

ERRORS = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
"""What the zarr package raises for data that are broken, or cannot be written."""

_CHUNK_NBYTES = 1 << 20
_TEXTS = 4096
_SIZES = {"uint": (8, 16, 32, 64), "int": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128), "bool": ("",)}
_DTYPES = frozenset(f"{kind}{bits}" for kind, sizes in _SIZES.items() for bits in sizes)


def unfit(schema: Schema) -> str:
    """Return why samples of this schema would not come back from Zarr as they were; "" if they would.

    >>> unfit({"x": Field("text")}), unfit({"a/b": Field("text")})
    ('', "'a/b' cannot be the name of a Zarr array")
    """
    if not schema:
        return "samples have no fields"
    for name, field in schema.items():
        if not name.isprintable() or not name or "/" in name or "\\" in name or set(name) == {"."} or name[:2] == "__":
            return f"{name!r} cannot be the name of a Zarr array"
        if field.kind in ("array", "number") and field.dtype not in _DTYPES:
            return f"field {name!r} has the type {field.dtype}"
    return ""


class Writer:
    """Writes samples to a new Zarr group.

    Args:
        path: of its folder; what is there is overwritten.
        schema: of every sample.

    Raises:
        SourceError: Zarr cannot hold such samples.
    """

    def __init__(self, path: str, schema: Schema) -> None:
        reason = unfit(schema)
        if reason:
            raise SourceError(f"{path}: {reason}")
        self._path = path
        self._schema = dict(schema)
        try:
            group = need("zarr", "zarr").open_group(path, mode="w", zarr_format=3)
            self._columns = {name: _column(group, name, field) for name, field in schema.items()}
        except ERRORS as error:
            raise SourceError(f"{path} cannot be written: {error}") from error

    def write(self, sample: Sample) -> None:
        """Add a sample.

        Raises:
            SourceError: it does not fit the schema, or cannot be written.
        """
        if sample.keys() != self._schema.keys():
            raise SourceError(f"{self._path}: a sample has the fields {sorted(sample)}, not {sorted(self._schema)}")
        values = {name: plain(value) for name, value in sample.items()}
        for name, field in self._schema.items():
            found = field_of(values[name])
            fits = (found.kind, found.dtype, len(found.shape)) == (field.kind, field.dtype, len(field.shape))
            if not fits or any(size not in (None, own) for size, own in zip(field.shape, found.shape, strict=True)):
                raise SourceError(f"{self._path}: field {name!r} is {found.words()}, and has to be {field.words()}")
        try:
            for name, column in self._columns.items():
                column.add(values[name])
        except ERRORS as error:
            raise SourceError(f"{self._path} cannot be written: {error}") from error

    def close(self) -> None:
        """Finish the group.

        Raises:
            SourceError: it cannot be written.
        """
        try:
            for column in self._columns.values():
                column.finish()
        except ERRORS as error:
            raise SourceError(f"{self._path} cannot be written: {error}") from error


class _Column(Protocol):
    def add(self, value: Any) -> None: ...
    def finish(self) -> None: ...


def _column(group: Any, name: str, field: Field) -> _Column:
    if field.kind == "text":
        return _Texts(group, name)
    if field.kind == "bytes" or field.is_ragged:
        return _Ragged(group.create_group(name), field)
    return _Fixed(group, name, np.dtype(field.dtype), tuple(size or 0 for size in field.shape))


class _Fixed:
    """An array of rows of one shape, made with the first block: fewer rows than a chunk has make a smaller chunk."""

    def __init__(self, group: Any, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._group, self._name = group, name
        row_nbytes = math.prod(shape) * dtype.itemsize
        self._block = np.empty((max(1, _CHUNK_NBYTES // max(1, row_nbytes)), *shape), dtype)
        self._filled = 0
        self._array: Any = None

    def add(self, value: Any) -> None:
        self._block[self._filled] = value
        self._filled += 1
        if self._filled == len(self._block):
            self._flush()

    def extend(self, values: np.ndarray) -> None:
        while len(values):
            part = values[: len(self._block) - self._filled]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            values = values[len(part) :]
            if self._filled == len(self._block):
                self._flush()

    def finish(self) -> None:
        if self._filled or self._array is None:
            self._flush()

    def _flush(self) -> None:
        if self._array is None:
            rest = self._block.shape[1:]
            chunk = (max(1, self._filled), *(max(1, size) for size in rest))
            self._array = self._group.create_array(self._name, shape=(0, *rest), chunks=chunk, dtype=self._block.dtype)
        _append(self._array, self._block[: self._filled])
        self._filled = 0


class _Texts:
    """An array of strings."""

    def __init__(self, group: Any, name: str) -> None:
        self._group, self._name = group, name
        self._held: list[str] = []
        self._array: Any = None

    def add(self, value: str) -> None:
        value.encode()
        self._held.append(value)
        if len(self._held) == _TEXTS:
            self.finish()

    def finish(self) -> None:
        if self._array is None:
            rows = max(1, len(self._held))
            self._array = self._group.create_array(self._name, shape=(0,), chunks=(rows,), dtype="string")
        _append(self._array, np.array(self._held, self._array.dtype))
        self._held.clear()


class _Ragged:
    """A group of arrays whose shapes differ, or of bytes."""

    def __init__(self, group: Any, field: Field) -> None:
        shape = (None,) if field.kind == "bytes" else field.shape
        dtype = np.dtype(np.uint8 if field.kind == "bytes" else field.dtype)
        group.attrs[RAGGED] = {"kind": field.kind, "shape": [-1 if size is None else size for size in shape]}
        whole = np.dtype(np.int64)
        self._values = _Fixed(group, "values", dtype, ())
        self._offsets = _Fixed(group, "offsets", whole, ())
        self._shapes = _Fixed(group, "shapes", whole, (len(shape),))
        self._total = 0

    def add(self, value: np.ndarray | bytes) -> None:
        array = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
        self._offsets.add(self._total)
        self._shapes.add(array.shape)
        self._values.extend(array.reshape(-1))
        self._total += array.size

    def finish(self) -> None:
        for column in (self._values, self._offsets, self._shapes):
            column.finish()


def _append(array: Any, rows: np.ndarray) -> None:
    start = array.shape[0]
    array.resize((start + len(rows), *array.shape[1:]))
    if rows.size:
        array[start:] = rows
