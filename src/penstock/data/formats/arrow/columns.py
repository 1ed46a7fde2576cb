"""Columns of Arrow arrays as NumPy sees them: the value of a row is a view of the column's buffers, and read-only.

Offsets and sizes in a file are not trusted: all are checked against their buffers when a column is made. types.py maps
Arrow types to columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.optional import need
from penstock.data.schema import Field

_DEEPEST = 32
_MOST_NBYTES = 1 << 40
"""Of an array whose empty and unknown dimensions are 1: NumPy multiplies them all."""
NUMBER_TYPES = {
    **{name: name for name in ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")},
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
    "date32": "int32",
    "time32": "int32",
    "date64": "int64",
    "time64": "int64",
    "timestamp": "int64",
    "duration": "int64",
}
"""Arrow's names of number types, and NumPy's."""


class Column:
    """The values of one field in some rows.

    Args:
        valid: which rows have one; None where all do.
    """

    def __init__(self, valid: np.ndarray | None) -> None:
        self.valid = valid

    def value(self, row: int) -> Any:
        """Return a row's value, or a view of it.

        Raises:
            SourceError: it is broken, or no array: rows of different lengths, nulls between numbers.
        """
        raise NotImplementedError

    def take(self, rows: np.ndarray, run: slice | None) -> Iterable[Any]:
        """Return the values of rows that all have one, as `value` does; `run` is these rows, if they are a slice."""
        return map(self.value, rows.tolist())


def fits_in_memory(dtype: str, shape: tuple[int | None, ...]) -> bool:
    """Return whether NumPy can have an array of this shape, whatever its empty and unknown dimensions are."""
    return math.prod(size or 1 for size in shape) * (np.dtype(dtype).itemsize if dtype else 1) <= _MOST_NBYTES


def number_type(type: Any) -> str:
    """Return NumPy's name of a number type; "" of any other."""
    return NUMBER_TYPES.get(str(type).partition("[")[0], "")


def number_unit(type: Any) -> str:
    """Return what a number type says beyond its size, as in "timestamp[us, tz=UTC]"; "" if nothing."""
    return str(type) if "[" in str(type) else ""


def list_sizes(type: Any) -> tuple[list[int | None], Any]:
    """Return the sizes of nested lists, None where they differ, and the type that the innermost has."""
    pa = need("pyarrow", "parquet")
    sizes: list[int | None] = []
    while len(sizes) < _DEEPEST:
        if pa.types.is_fixed_size_list(type):
            sizes.append(type.list_size)
        elif pa.types.is_list(type) or pa.types.is_large_list(type):
            sizes.append(None)
        else:
            break
        type = type.value_type
    return sizes, type


def _valid(array: Any) -> np.ndarray | None:
    """Return which values are there; None where all are."""
    if not array.null_count:
        return None
    valid: np.ndarray = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _flat(array: Any, dtype: str) -> np.ndarray:
    """Return the numbers of a column: a read-only view, or unpacked bits."""
    buffer = array.buffers()[1]
    if not len(array) or buffer is None:
        values = np.empty(0, dtype)
    elif dtype == "bool":
        first = array.offset // 8
        bits = np.frombuffer(buffer, np.uint8)[first : (array.offset + len(array) + 7) // 8]
        values = np.unpackbits(bits, bitorder="little")[array.offset % 8 :][: len(array)].view(bool)
    else:
        values = np.frombuffer(buffer, dtype, len(array), array.offset * np.dtype(dtype).itemsize)
    if len(values) != len(array):
        raise SourceError(f"a column of {len(array)} numbers has {len(values)}")
    values.flags.writeable = False
    return values


class FixedShapeArrays(Column):
    """Numbers, or arrays of one shape."""

    def __init__(self, valid: np.ndarray | None, values: np.ndarray, holes: np.ndarray | None = None) -> None:
        super().__init__(valid)
        self._values = values
        self._holes = holes

    def value(self, row: int) -> Any:
        """Return a number, or a view of an array."""
        if self._holes is not None and self._holes[row]:
            raise SourceError("it has nulls between its numbers; see objects=")
        return self._values[row]

    def take(self, rows: np.ndarray, run: slice | None) -> Iterable[Any]:
        """Return numbers, or views of arrays."""
        if self._holes is not None and self._holes[rows].any():
            return super().take(rows, run)
        if run is not None:
            return self._values[run]
        return self._values[rows] if self._values.ndim == 1 else map(self._values.__getitem__, rows.tolist())


def fixed_shape_column(array: Any, dtype: str, shape: tuple[int, ...] = (), order: tuple[int, ...] = ()) -> Column:
    """Return a column of numbers, or of lists whose sizes are fixed; `order` are axes as samples have them."""
    rows, valid = len(array), _valid(array)
    start, count = 0, rows
    holes: np.ndarray | None = None
    while need("pyarrow", "parquet").types.is_fixed_size_list(array.type):
        size = array.type.list_size
        start, count = (array.offset + start) * size, count * size
        array = array.values
        inner = _valid(array)
        if inner is not None:
            missing = np.logical_not(inner[start : start + count].reshape(rows, -1).all(axis=1))
            holes = missing if holes is None else holes | missing
    values = _flat(array, dtype)[start : start + count].reshape(rows, *shape)
    if order:
        values = values.transpose(0, *(axis + 1 for axis in order))
    return FixedShapeArrays(valid, values, holes)


def raw_column(array: Any, dtype: str, shape: tuple[int, ...]) -> Column:
    """Return a column of arrays' bytes, all of one size."""
    cells = FixedSizeBytes(array)
    values = np.frombuffer(cells.data, dtype).reshape(len(array), *shape)
    values.flags.writeable = False
    return FixedShapeArrays(cells.valid, _checked(values))


def empty_column(array: Any, dtype: str, shape: tuple[int, ...]) -> Column:
    """Return a column of arrays without a number."""
    return FixedShapeArrays(_valid(array), np.empty((len(array), *shape), dtype))


class FixedSizeBytes(Column):
    """Bytes of a fixed size."""

    def __init__(self, array: Any) -> None:
        super().__init__(_valid(array))
        self._nbytes = array.type.byte_width
        buffer = array.buffers()[1]
        start, nbytes = array.offset * self._nbytes, len(array) * self._nbytes
        self.data = memoryview(buffer if buffer is not None else b"")[start : start + nbytes]
        if len(self.data) != nbytes:
            raise SourceError(f"a column of {nbytes} bytes has {len(self.data)}")

    def value(self, row: int) -> Any:
        """Return bytes."""
        return bytes(self.data[row * self._nbytes : (row + 1) * self._nbytes])


class VariableSizeBytes(Column):
    """Text, or bytes, of different sizes."""

    def __init__(self, array: Any, is_text: bool = False) -> None:
        pa = need("pyarrow", "parquet")
        super().__init__(_valid(array))
        self._is_text = is_text
        if str(array.type).endswith("_view"):
            array = array.cast(pa.large_string() if is_text else pa.large_binary())
        is_large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
        _, offsets, data = array.buffers()
        self._data = memoryview(data if data is not None else b"")
        dtype = np.dtype(np.int64 if is_large else np.int32)
        count = len(array) + 1 if len(array) else 0
        start = array.offset * dtype.itemsize
        self._offsets = np.frombuffer(offsets if offsets is not None else b"", dtype, count, start if count else 0)
        _check_offsets(self._offsets, len(self._data))

    def raw(self, row: int) -> memoryview:
        """Return a view of a row's bytes."""
        return self._data[self._offsets[row] : self._offsets[row + 1]]

    def value(self, row: int) -> Any:
        """Return text or bytes."""
        raw = self._data[self._offsets[row] : self._offsets[row + 1]]
        if not self._is_text:
            return bytes(raw)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise SourceError(f"it is no UTF-8: {error}") from error

    def take(self, rows: np.ndarray, run: slice | None) -> Iterable[Any]:
        """Return texts or bytes."""
        data, spans = self._data, zip(self._offsets[rows].tolist(), self._offsets[rows + 1].tolist(), strict=True)
        try:
            return [str(data[begin:end], "utf-8") if self._is_text else bytes(data[begin:end]) for begin, end in spans]
        except UnicodeDecodeError as error:
            raise SourceError(f"it is no UTF-8: {error}") from error


class PythonObjects(Column):
    """Values of any type, as Python has them: lists, dicts, tuples, Decimal."""

    def __init__(self, array: Any) -> None:
        array.validate(full=True)
        super().__init__(_valid(array))
        self._array = array

    def value(self, row: int) -> Any:
        """Return a new object."""
        try:
            return self._array[row].as_py()
        except (ValueError, OverflowError, ImportError) as error:  # years beyond 9999, nanoseconds without pandas
            raise SourceError(f"it cannot be a Python object: {error}") from error


class DictionaryEncoded(Column):
    """Numbers of entries in a dictionary."""

    def __init__(self, make: Callable[[Any], Column], array: Any) -> None:
        super().__init__(_valid(array))
        self._entries = make(array.dictionary)
        self._numbers = _flat(array.indices, number_type(array.type.index_type))
        there = self._numbers if self.valid is None else self._numbers[self.valid]
        if there.size and not (0 <= int(there.min()) and int(there.max()) < len(array.dictionary)):
            raise SourceError(f"a column has entries outside of its dictionary of {len(array.dictionary)}")

    def value(self, row: int) -> Any:
        """Return the entry."""
        number = int(self._numbers[row])
        if self._entries.valid is not None and not self._entries.valid[number]:
            raise SourceError("it is null")
        return self._entries.value(number)


@dataclass(frozen=True, slots=True)
class _Level:
    """Where lists begin and end in the column of what is in them."""

    offsets: np.ndarray | None
    """None where all have one size."""
    size: int
    first: int
    """The first list's place, where they have one size."""
    holes: np.ndarray | None
    """Which of what is in them is there."""

    @classmethod
    def of(cls, array: Any) -> _Level:
        if need("pyarrow", "parquet").types.is_fixed_size_list(array.type):
            return cls(None, array.type.list_size, array.offset, _valid(array.values))
        offsets = array.offsets.to_numpy() if len(array) else np.zeros(1, np.int32)
        _check_offsets(offsets, len(array.values))
        return cls(offsets, 0, 0, _valid(array.values))

    def within(self, first: int, last: int) -> tuple[int, int, int]:
        """Return where what lists `first` to `last` hold begins and ends, and how many each of them holds."""
        if self.offsets is None:
            begin, end, size = (self.first + first) * self.size, (self.first + last) * self.size, self.size
        else:
            begin, end = int(self.offsets[first]), int(self.offsets[last])
            size = (end - begin) // max(1, last - first)
            if last - first > 1 and (np.diff(self.offsets[first : last + 1]) != size).any():
                raise SourceError("its rows have different lengths, and so are no array; see objects=")
        if self.holes is not None and not self.holes[begin:end].all():
            raise SourceError("it has nulls between its numbers; see objects=")
        return begin, end, size


class Ragged(Column):
    """Nested lists, of different sizes."""

    def __init__(self, array: Any, dtype: str) -> None:
        super().__init__(_valid(array))
        self._levels = []
        while list_sizes(array.type)[0]:
            self._levels.append(_Level.of(array))
            array = array.values
        self.values = _flat(array, dtype)

    def value(self, row: int) -> Any:
        """Return a view of an array."""
        begin, end = row, row + 1
        shape = []
        for level in self._levels:
            begin, end, size = level.within(begin, end)
            shape.append(size)
        values = self.values[begin:end]
        return values if len(shape) == 1 else values.reshape(shape)


class TensorWithShape(Column):
    """Arrays with their shapes beside them."""

    def __init__(self, array: Any, field: Field, is_raw: bool) -> None:
        super().__init__(_valid(array))
        data, shapes = array.field(0), array.field(1)
        self._field = field
        self._data: Column = VariableSizeBytes(data) if is_raw else Ragged(data, field.dtype)
        self._shapes = fixed_shape_column(shapes, "int32", (len(field.shape),))
        self._inner = [one.valid for one in (self._data, self._shapes) if one.valid is not None]

    def value(self, row: int) -> Any:
        """Return a view of an array."""
        if not all(valid[row] for valid in self._inner):
            raise SourceError("its data or its shape is null")
        shape = tuple(self._shapes.value(row).tolist())
        if isinstance(self._data, VariableSizeBytes):
            raw = self._data.raw(row)
            if len(raw) % np.dtype(self._field.dtype).itemsize:
                raise SourceError(f"{len(raw)} bytes are no array of {self._field.dtype}")
            values = _checked(np.frombuffer(raw, self._field.dtype))
            values.flags.writeable = False
        else:
            values = self._data.value(row)
        if min(shape) < 0 or math.prod(shape) != len(values) or not fits_in_memory(self._field.dtype, shape):
            raise SourceError(f"it has {len(values)} numbers, and the shape {shape}")
        if any(one not in (None, other) for one, other in zip(self._field.shape, shape, strict=True)):
            raise SourceError(f"its shape is {shape}, and it should be {self._field.words()}")
        return values.reshape(shape)


def _check_offsets(offsets: np.ndarray, end: int) -> None:
    """Raise SourceError unless offsets ascend and end within the `end` values that they point to."""
    if offsets.size and (offsets[0] < 0 or (offsets[1:] < offsets[:-1]).any() or offsets[-1] > end):
        raise SourceError("a column's values lie outside of what holds them")


def _checked(values: np.ndarray) -> np.ndarray:
    """Return bytes that are taken for numbers: of bool, they have to be 0 or 1."""
    if values.dtype.kind == "b" and values.size and values.view(np.uint8).max() > 1:
        raise SourceError("it is bool, and holds bytes that are neither 0 nor 1")
    return values
