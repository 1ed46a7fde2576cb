"""Columns of Arrow arrays: numbers as read-only views of the array's buffers, the rest as objects that pyarrow makes.

Nothing in a file is trusted: pyarrow has validated offsets and indices before a column is made of an array (`types`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.optional import need
from penstock.data.rows import Column, Rows
from penstock.data.schema import Field

_MOST_NBYTES = 1 << 40
"""Of an array whose empty and unknown dimensions are 1: NumPy multiplies them all."""
_NO_OBJECT = (ValueError, OverflowError, ImportError)
"""Text that is no UTF-8, years beyond 9999, nanoseconds without pandas."""
_HOLES = "it has nulls between its numbers; see objects="


def fits_in_memory(field: Field) -> bool:
    """Return whether NumPy can have an array of this shape, whatever its empty and unknown dimensions are."""
    itemsize = np.dtype(field.dtype).itemsize if field.dtype else 1
    return math.prod(size or 1 for size in field.shape) * itemsize <= _MOST_NBYTES


def python_column(array: Any) -> Column:
    """Return a column of text, bytes or nested values: lists, dicts, tuples, Decimal."""

    def take(rows: Rows) -> Any:
        try:
            if isinstance(rows, slice):
                one = rows.stop - rows.start == 1  # in half the time
                return [array[rows.start].as_py()] if one else array[rows].to_pylist()
            try:
                return array.take(rows).to_pylist()
            except NotImplementedError:  # of views of text, in pyarrow 26
                return [array[row].as_py() for row in rows.tolist()]
        except _NO_OBJECT as error:
            raise SourceError(f"it cannot be a Python object: {error}") from error

    return Column(take, bool(array.null_count))


def fixed_shape_column(array: Any, dtype: str, shape: tuple[int, ...] = (), order: tuple[int, ...] = ()) -> Column:
    """Return a column of numbers, or of lists whose sizes are fixed; `order` are axes as samples have them."""
    valid, rows = _valid(array), len(array)
    start, count = 0, rows
    broken: np.ndarray | None = None
    while hasattr(array.type, "list_size"):
        size = array.type.list_size
        start, count = (array.offset + start) * size, count * size
        array = array.values
        inner = _valid(array)
        if inner is not None:
            missing = np.logical_not(inner[start : start + count].reshape(rows, -1).all(axis=1))
            broken = missing if broken is None else np.logical_or(broken, missing)
    values = numbers(array, dtype)[start : start + count].reshape(rows, *shape)
    if order:
        values = values.transpose(0, *(axis + 1 for axis in order))
    return _column_of(values, valid, broken if broken is None or valid is None else broken & valid)


def raw_column(array: Any, dtype: str, shape: tuple[int, ...]) -> Column:
    """Return a column of arrays' bytes, all of one size."""
    values = numbers(array, dtype, math.prod(shape)).reshape(len(array), *shape)
    return _column_of(_checked(values), _valid(array))


def empty_column(array: Any, dtype: str, shape: tuple[int, ...]) -> Column:
    """Return a column of arrays without a number."""
    return _column_of(np.empty((len(array), *shape), dtype), _valid(array))


def dictionary_column(array: Any, make: Callable[[Any], Column]) -> Column:
    """Return a column of entries of a dictionary, of which `make` makes a column."""
    valid, entries = _valid(array), make(array.dictionary)
    indices = numbers(array.indices, str(array.type.index_type))
    there = indices if valid is None else indices[valid]
    if there.size and not (0 <= int(there.min()) and int(there.max()) < len(array.dictionary)):
        raise SourceError(f"a column has entries outside of its dictionary of {len(array.dictionary)}")

    return Column(
        lambda rows: _with_nulls(valid, rows, lambda wanted: entries.take(indices[wanted])),
        valid is not None or entries.has_nulls,
    )


def ragged_column(array: Any, dtype: str, sizes: Sequence[int | None]) -> Column:
    """Return a column of nested lists, whose sizes are None where they differ."""
    valid, offsets, holes = _valid(array), [], []
    for size in sizes:
        offsets.append(_offsets(array, size))
        array = array.values
        holes.append(_valid(array))
    values = numbers(array, dtype)

    def one(row: int) -> np.ndarray:
        begin, end, shape = row, row + 1, []
        for at, hole, size in zip(offsets, holes, sizes, strict=True):
            first, last, count = int(at[begin]), int(at[end]), end - begin
            length = (last - first) // max(1, count)
            if count > 1 and (np.diff(at[begin : end + 1]) != length).any():
                raise SourceError("its rows have different lengths, and so are no array; see objects=")
            if hole is not None and not hole[first:last].all():
                raise SourceError(_HOLES)
            shape.append(length if size is None else size)
            begin, end = first, last
        return values[begin:end] if len(shape) == 1 else values[begin:end].reshape(shape)

    def take(rows: Rows) -> Any:
        if valid is None and len(sizes) == 1 and holes[0] is None:
            begins, ends = offsets[0][:-1][rows].tolist(), offsets[0][1:][rows].tolist()
            return [values[begin:end] for begin, end in zip(begins, ends, strict=True)]
        return _with_nulls(valid, rows, lambda wanted: [*map(one, wanted.tolist())])

    return Column(take, valid is not None)


def tensor_column(array: Any, field: Field, is_raw: bool) -> Column:
    """Return a column of arrays with their shapes beside them: a struct of data, numbers or their bytes, and shape."""
    valid, raw = _valid(array), array.field(0)
    data = None if is_raw else ragged_column(raw, field.dtype, (None,))
    shapes = fixed_shape_column(array.field(1), "int32", (len(field.shape),))

    def one(values: Any, shape: Any) -> np.ndarray:
        if shape is None or values is None:
            raise SourceError("its data or its shape is null")
        shape = tuple(shape.tolist())
        if is_raw:
            if len(values) % np.dtype(field.dtype).itemsize:
                raise SourceError(f"{len(values)} bytes are no array of {field.dtype}")
            values = _checked(np.frombuffer(values, field.dtype))
        if min(shape) < 0 or math.prod(shape) != len(values) or not fits_in_memory(Field("array", field.dtype, shape)):
            raise SourceError(f"it has {len(values)} numbers, and the shape {shape}")
        if any(size not in (None, own) for size, own in zip(field.shape, shape, strict=True)):
            raise SourceError(f"its shape is {shape}, and it should be {field.words()}")
        shaped: np.ndarray = values.reshape(shape)
        return shaped

    def take_there(rows: np.ndarray) -> Any:
        values = [raw[row].as_buffer() for row in rows.tolist()] if data is None else data.take(rows)
        return [*map(one, values, shapes.take(rows))]

    return Column(lambda rows: _with_nulls(valid, rows, take_there), valid is not None)


def numbers(array: Any, dtype: str, width: int = 1) -> np.ndarray:
    """Return the numbers of an array, `width` of them in each row: a read-only view, or unpacked bits."""
    if dtype == "bool" and str(array.type) == "bool":
        array = array.cast(need("pyarrow", "parquet").uint8())
    buffer, itemsize = array.buffers()[1], np.dtype(dtype).itemsize
    if not len(array) or buffer is None:
        values = np.empty(0, dtype)
    else:
        values = np.frombuffer(buffer, dtype, len(array) * width, array.offset * width * itemsize)
    values.flags.writeable = False
    return values


def _column_of(values: np.ndarray, valid: np.ndarray | None, broken: np.ndarray | None = None) -> Column:
    def take(rows: Rows) -> Any:
        if broken is not None and broken[rows].any():
            raise SourceError(_HOLES)
        if isinstance(rows, slice) or values.ndim == 1:
            found: Any = values[rows]
        else:
            found = [values[row] for row in rows.tolist()]  # views: to index by an array is to copy
        if valid is None:
            return found
        return [value if is_there else None for value, is_there in zip(found, valid[rows].tolist(), strict=True)]

    return Column(take, valid is not None)


def _with_nulls(valid: np.ndarray | None, rows: Rows, take: Callable[[np.ndarray], Any]) -> Any:
    """Return what `take` gives for the rows that are not null, and None for the others."""
    wanted = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
    if valid is None:
        return take(wanted)
    there = valid[wanted]
    found = iter(take(wanted[there]))
    return [next(found) if is_there else None for is_there in there.tolist()]


def _valid(array: Any) -> np.ndarray | None:
    """Return which values are there; None where all are."""
    if not array.null_count:
        return None
    valid: np.ndarray = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _offsets(array: Any, size: int | None) -> np.ndarray:
    """Return where the lists of an array begin, and where the last one ends, in the array of what is in them."""
    offsets: np.ndarray
    if size is not None:
        offsets = (array.offset + np.arange(len(array) + 1)) * size
    else:
        offsets = array.offsets.to_numpy() if len(array) else np.zeros(1, np.int32)
    return offsets


def _checked(values: np.ndarray) -> np.ndarray:
    """Return bytes that are taken for numbers, read-only: of bool, they have to be 0 or 1."""
    if values.dtype.kind == "b" and values.size and values.view(np.uint8).max() > 1:
        raise SourceError("it is bool, and holds bytes that are neither 0 nor 1")
    values.flags.writeable = False
    return values
