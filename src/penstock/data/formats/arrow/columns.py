"""Columns of Arrow arrays as samples have them: numbers as read-only views of the column's buffers, the rest as Python
objects that pyarrow makes of the rows that are asked for.

Offsets and indices in a file are not trusted: all are checked when a column is made. types.py maps Arrow types to
columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.optional import need
from penstock.data.schema import Field

DEEPEST = 32
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

_NO_OBJECT = (ValueError, OverflowError, ImportError)
"""Text that is no UTF-8, years beyond 9999, nanoseconds without pandas."""


class Column:
    """The values of one field in some rows.

    Raises:
        SourceError: a value that is asked for is broken, or no array: lists of different lengths, nulls in them.
    """

    def __init__(self, array: Any) -> None:
        self._valid = _valid(array)
        self._count = len(array)
        self.has_nulls = self._valid is not None

    def value(self, row: int) -> Any:
        """Return a row's value, or a view of it; None where it is null."""
        return None if self._valid is not None and not self._valid[row] else self._value(row)

    def _value(self, row: int) -> Any:
        raise NotImplementedError

    def take(self, rows: np.ndarray | slice) -> Iterable[Any]:
        """Return the values of some rows, as `value` does."""
        return map(self.value, np.arange(self._count)[rows].tolist())


class PythonValues(Column):
    """Text, bytes and nested values: Python objects that pyarrow makes."""

    def __init__(self, array: Any) -> None:
        self.has_nulls = bool(array.null_count)
        self._array = array

    def value(self, row: int) -> Any:
        """Return a new object."""
        return self._objects(lambda: self._array[row].as_py())

    def take(self, rows: np.ndarray | slice) -> Iterable[Any]:
        """Return new objects."""
        if isinstance(rows, slice):
            array = self._array[rows]
        else:
            try:
                array = self._array.take(rows)
            except NotImplementedError:  # of views of text, in pyarrow 26
                return map(self.value, rows.tolist())
        found: list[Any] = self._objects(array.to_pylist)
        return found

    def _objects(self, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except _NO_OBJECT as error:
            raise SourceError(f"it cannot be a Python object: {error}") from error


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
    types = need("pyarrow", "parquet").types
    sizes: list[int | None] = []
    while len(sizes) < DEEPEST:
        if types.is_fixed_size_list(type):
            sizes.append(type.list_size)
        elif types.is_list(type) or types.is_large_list(type):
            sizes.append(None)
        else:
            break
        type = type.value_type
    return sizes, type


def text_column(array: Any) -> Column:
    """Return a column of text or bytes."""
    pa = need("pyarrow", "parquet")
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):  # not whether all of it is UTF-8
        array.view(pa.binary() if pa.types.is_string(array.type) else pa.large_binary()).validate(full=True)
        return PythonValues(array)
    return object_column(array)


def object_column(array: Any) -> Column:
    """Return a column of any type: lists, dicts, tuples, Decimal."""
    array.validate(full=True)
    return PythonValues(array)


def _valid(array: Any) -> np.ndarray | None:
    """Return which values are there; None where all are."""
    if not array.null_count:
        return None
    valid: np.ndarray = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _numbers(array: Any, dtype: str, width: int = 1) -> np.ndarray:
    """Return the numbers of a column, `width` of them in each row: a read-only view, or unpacked bits."""
    if dtype == "bool" and str(array.type) == "bool":
        array = array.cast(need("pyarrow", "parquet").uint8())
    buffer, itemsize = array.buffers()[1], np.dtype(dtype).itemsize
    if not len(array) or buffer is None:
        values = np.empty(0, dtype)
    else:
        values = np.frombuffer(buffer, dtype, len(array) * width, array.offset * width * itemsize)
    values.flags.writeable = False
    return values


class FixedShapeArrays(Column):
    """Numbers, or arrays of one shape.

    Args:
        array: Arrow's, of as many rows.
        values: number[rows, ...].
        holes: which rows have nulls between their numbers, bool[rows]; None if no row has.
    """

    def __init__(self, array: Any, values: np.ndarray, holes: np.ndarray | None = None) -> None:
        super().__init__(array)
        self._values = values
        self._holes = holes

    def _value(self, row: int) -> Any:
        if self._holes is not None and self._holes[row]:
            raise SourceError("it has nulls between its numbers; see objects=")
        return self._values[row]

    def take(self, rows: np.ndarray | slice) -> Iterable[Any]:
        """Return numbers, or views of arrays."""
        if self.has_nulls or self._holes is not None:
            return super().take(rows)
        if isinstance(rows, slice) or self._values.ndim == 1:
            return self._values[rows]
        return map(self._values.__getitem__, rows.tolist())


def fixed_shape_column(array: Any, dtype: str, shape: tuple[int, ...] = (), order: tuple[int, ...] = ()) -> Column:
    """Return a column of numbers, or of lists whose sizes are fixed; `order` are axes as samples have them."""
    whole, rows = array, len(array)
    start, count = 0, rows
    holes: np.ndarray | None = None
    while hasattr(array.type, "list_size"):
        size = array.type.list_size
        start, count = (array.offset + start) * size, count * size
        array = array.values
        inner = _valid(array)
        if inner is not None:
            missing = np.logical_not(inner[start : start + count].reshape(rows, -1).all(axis=1))
            holes = missing if holes is None else holes | missing
    values = _numbers(array, dtype)[start : start + count].reshape(rows, *shape)
    if order:
        values = values.transpose(0, *(axis + 1 for axis in order))
    return FixedShapeArrays(whole, values, holes)


def raw_column(array: Any, dtype: str, shape: tuple[int, ...]) -> Column:
    """Return a column of arrays' bytes, all of one size."""
    values = _numbers(array, dtype, math.prod(shape)).reshape(len(array), *shape)
    return FixedShapeArrays(array, _checked(values))


def empty_column(array: Any, dtype: str, shape: tuple[int, ...]) -> Column:
    """Return a column of arrays without a number."""
    return FixedShapeArrays(array, np.empty((len(array), *shape), dtype))


class DictionaryEncoded(Column):
    """Numbers of entries in a dictionary."""

    def __init__(self, make: Callable[[Any], Column], array: Any) -> None:
        super().__init__(array)
        self._entries = make(array.dictionary)
        self._numbers = _numbers(array.indices, number_type(array.type.index_type))
        there = self._numbers if self._valid is None else self._numbers[self._valid]
        if there.size and not (0 <= int(there.min()) and int(there.max()) < len(array.dictionary)):
            raise SourceError(f"a column has entries outside of its dictionary of {len(array.dictionary)}")
        self.has_nulls |= self._entries.has_nulls

    def _value(self, row: int) -> Any:
        return self._entries.value(int(self._numbers[row]))

    def take(self, rows: np.ndarray | slice) -> Iterable[Any]:
        """Return the entries."""
        return self._entries.take(self._numbers[rows]) if self._valid is None else super().take(rows)


class _Level:
    """Where the lists of an array begin and end in the array of what is in them."""

    def __init__(self, array: Any) -> None:
        self.holes = _valid(array.values)
        """Which of what is in them is there."""
        if hasattr(array.type, "list_size"):
            self.offsets = (array.offset + np.arange(len(array) + 1)) * array.type.list_size
            return
        self.offsets = array.offsets.to_numpy() if len(array) else np.zeros(1, np.int32)
        ascend = self.offsets[0] >= 0 and (self.offsets[1:] >= self.offsets[:-1]).all()
        if not ascend or self.offsets[-1] > len(array.values):
            raise SourceError("a column's values lie outside of what holds them")

    def within(self, first: int, last: int) -> tuple[int, int, int]:
        """Return where what lists `first` to `last` hold begins and ends, and how many each of them holds."""
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
        super().__init__(array)
        self._sizes = list_sizes(array.type)[0]
        self._levels = []
        for _ in self._sizes:
            self._levels.append(_Level(array))
            array = array.values
        self.values = _numbers(array, dtype)

    def _value(self, row: int) -> Any:
        begin, end, shape = row, row + 1, []
        for level, stated in zip(self._levels, self._sizes, strict=True):
            begin, end, size = level.within(begin, end)
            shape.append(size if stated is None else stated)
        values = self.values[begin:end]
        return values if len(shape) == 1 else values.reshape(shape)

    def take(self, rows: np.ndarray | slice) -> Iterable[Any]:
        """Return views of arrays."""
        first, values = self._levels[0], self.values
        if self._valid is None and len(self._levels) == 1 and first.holes is None:
            begins, ends = first.offsets[:-1][rows].tolist(), first.offsets[1:][rows].tolist()
            return [values[begin:end] for begin, end in zip(begins, ends, strict=True)]
        return super().take(rows)


class TensorWithShape(Column):
    """Arrays with their shapes beside them: a struct of data, numbers or their bytes, and shape."""

    def __init__(self, array: Any, field: Field, is_raw: bool) -> None:
        super().__init__(array)
        self._field = field
        self._bytes = array.field(0) if is_raw else None
        self._data = text_column(array.field(0)) if is_raw else Ragged(array.field(0), field.dtype)
        self._shapes = fixed_shape_column(array.field(1), "int32", (len(field.shape),))

    def _value(self, row: int) -> Any:
        shape, dtype = self._shapes.value(row), self._field.dtype
        raw = self._bytes[row].as_buffer() if self._bytes is not None else self._data.value(row)
        if shape is None or raw is None:
            raise SourceError("its data or its shape is null")
        shape = tuple(shape.tolist())
        if self._bytes is not None and len(raw) % np.dtype(dtype).itemsize:
            raise SourceError(f"{len(raw)} bytes are no array of {dtype}")
        values = _checked(np.frombuffer(raw, dtype)) if self._bytes is not None else raw
        values.flags.writeable = False
        if min(shape) < 0 or math.prod(shape) != len(values) or not fits_in_memory(dtype, shape):
            raise SourceError(f"it has {len(values)} numbers, and the shape {shape}")
        if any(one not in (None, other) for one, other in zip(self._field.shape, shape, strict=True)):
            raise SourceError(f"its shape is {shape}, and it should be {self._field.words()}")
        return values.reshape(shape)


def _checked(values: np.ndarray) -> np.ndarray:
    """Return bytes that are taken for numbers: of bool, they have to be 0 or 1."""
    if values.dtype.kind == "b" and values.size and values.view(np.uint8).max() > 1:
        raise SourceError("it is bool, and holds bytes that are neither 0 nor 1")
    return values
