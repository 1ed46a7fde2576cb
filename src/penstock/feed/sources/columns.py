"""Arrow columns, and the values of samples in them.

    number    a column of a number type; dates, times and durations are their integers, in the column's unit
    text      utf8, large_utf8, utf8_view
    bytes     binary, large_binary, binary_view, fixed_size_binary
    array     lists, large lists and lists of a fixed size of numbers, nested or not, as long as they form a block;
              arrow.fixed_shape_tensor, arrow.variable_shape_tensor
    struct    not a value: its fields are, under names as "image/bytes"

A dictionary-encoded column is what its dictionary is. Decimals, maps, unions, lists of text are not read, and named.

What `field` and `array` write for arrays of numbers is one of

    tensors   arrow.fixed_shape_tensor; for shapes that differ arrow.variable_shape_tensor: a struct of data (a list of
              the numbers, C order) and shape (a fixed-size list of int32). Every program that knows Arrow reads them.
    raw       fixed_size_binary of the array's bytes (C order, little-endian), binary where it has none; for shapes that
              differ a struct of data (binary) and shape. Parquet reads it many times as fast as lists.

Both have dtype and shape in the column's metadata, under "penstock.array", as in "float32[3, ?]".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from penstock.core.errors import SourceError
from penstock.feed.sources.extras import need
from penstock.feed.sources.sample import Field

Layout = Literal["tensors", "raw"]

ARRAY_METADATA = b"penstock.array"
_ARRAY = re.compile(r"(\w{1,16})\[((?:\?|\d{1,15})(?:, (?:\?|\d{1,15})){0,31})\]")
_EXTENSION = b"ARROW:extension:name"
_EXTENSION_METADATA = b"ARROW:extension:metadata"
VARIABLE_TENSOR = b"arrow.variable_shape_tensor"
_DEEPEST = 32
_MOST_NBYTES = 1 << 40
"""Of an array whose empty and unknown dimensions are 1: NumPy multiplies them all."""
_NUMBERS = {
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


@dataclass(frozen=True, slots=True)
class Leaf:
    """A field that samples can have."""

    field: Field
    path: tuple[str, ...]
    """The column's name, then those of structs' fields."""
    make: Callable[[Any], Column]

    def column(self, batch: Any) -> Column:
        """Return the field's column of a record batch."""
        array = batch.column(batch.schema.get_field_index(self.path[0]))
        for name in self.path[1:]:
            array = array.flatten()[array.type.get_field_index(name)]
        return self.make(array)


def leaves(schema: Any) -> dict[str, Leaf | str]:
    """Return the fields that samples of an Arrow schema can have; for those that cannot be read, why."""
    found: dict[str, Leaf | str] = {}
    for field in schema:
        _find(field, (field.name,), found)
    return found


def _find(field: Any, path: tuple[str, ...], found: dict[str, Leaf | str]) -> None:
    name = "/".join(path)
    made = _reader(field)
    if name in found:
        found[name] = "two columns have this name"
    elif not isinstance(made, str) and not _fits(made[0].dtype, made[0].shape):
        found[name] = f"it is {made[0].words()}, which is larger than any memory"
    elif not isinstance(made, str):
        found[name] = Leaf(made[0], path, made[1])
    elif need("pyarrow", "parquet").types.is_struct(field.type) and len(path) < _DEEPEST:
        for number in range(field.type.num_fields):
            _find(field.type.field(number), (*path, field.type.field(number).name), found)
    else:
        found[name] = made


_Reader = tuple[Field, Callable[[Any], Column]]


def _reader(field: Any) -> _Reader | str:
    """Return what a column holds and what reads it, or why nothing does."""
    pa = need("pyarrow", "parquet")
    type, metadata = field.type, field.metadata or {}
    if isinstance(type, pa.BaseExtensionType):
        metadata |= {_EXTENSION: type.extension_name.encode(), _EXTENSION_METADATA: str(type).encode()}
        made = _reader(pa.field("", type.storage_type, metadata=metadata))
        if isinstance(made, str):
            return made
        if isinstance(type, pa.FixedShapeTensorType):
            made = _tensor(type, made[0].dtype)
        return made[0], partial(_stored, made[1])
    if ARRAY_METADATA in metadata or metadata.get(_EXTENSION) == VARIABLE_TENSOR:
        return _own(type, metadata)
    if pa.types.is_dictionary(type):
        made = _reader(pa.field("", type.value_type))
        return made if isinstance(made, str) else (made[0], partial(_Coded, made[1]))
    if pa.types.is_string(type) or pa.types.is_large_string(type) or pa.types.is_string_view(type):
        return Field("text"), partial(_Spans, is_text=True)
    if pa.types.is_binary(type) or pa.types.is_large_binary(type) or pa.types.is_binary_view(type):
        return Field("bytes"), _Spans
    if pa.types.is_fixed_size_binary(type):
        return Field("bytes"), _Cells
    sizes, inner = _sizes(type)
    dtype = _number(inner)
    if not dtype:
        return f"it is {str(type)[:200]}, which is no number, text or bytes, nor an array of numbers"
    found = Field("array", dtype, tuple(sizes)) if sizes else Field("number", dtype)
    if None in sizes:
        return found, partial(_Ragged, dtype=dtype)
    return found, partial(_blocks, dtype=dtype, shape=tuple(size or 0 for size in sizes))


def _own(type: Any, metadata: dict[bytes, bytes]) -> _Reader | str:
    """Return what reads an array with dtype and shape in its column's metadata, or with its shape beside it."""
    words = metadata.get(ARRAY_METADATA, b"").decode("ascii", "replace")
    found = _ARRAY.fullmatch(words)
    if words and (found is None or found[1] not in _NUMBERS.values()):
        return f"its metadata say {words[:100]!r}, which is no array"
    field = None
    if found is not None:
        field = Field("array", found[1], tuple(None if size == "?" else int(size) for size in found[2].split(", ")))
    if need("pyarrow", "parquet").types.is_struct(type):
        if b"permutation" in metadata.get(_EXTENSION_METADATA, b""):
            return "it is a tensor whose axes are permuted"
        made = _own_shaped(type, field)
    else:
        made = _own_fixed(type, field)
    return made or f"its metadata say {words!r}, and it is {str(type)[:200]}"


def _own_shaped(type: Any, field: Field | None) -> _Reader | None:
    """Return what reads a struct of data and shape; None where it is something else."""
    types = need("pyarrow", "parquet").types
    if [type.field(number).name for number in range(type.num_fields)] != ["data", "shape"]:
        return None
    data, shape = type.field(0).type, type.field(1).type
    if not types.is_fixed_size_list(shape) or not types.is_int32(shape.value_type):
        return None
    if types.is_list(data) or types.is_large_list(data):
        dtype = _number(data.value_type)
        field = field or Field("array", dtype, (None,) * shape.list_size)
        if not dtype or dtype != field.dtype:
            return None
    elif field is None or not types.is_binary(data):
        return None
    if not field.shape or len(field.shape) != shape.list_size:
        return None
    return field, partial(_Shaped, field=field, is_raw=types.is_binary(data))


def _own_fixed(type: Any, field: Field | None) -> _Reader | None:
    """Return what reads arrays of one shape; None where the column does not hold them."""
    types = need("pyarrow", "parquet").types
    if field is None or field.is_ragged:
        return None
    shape = tuple(size or 0 for size in field.shape)
    if types.is_fixed_size_binary(type) and type.byte_width == field.nbytes() > 0:
        return field, partial(_raw_blocks, dtype=field.dtype, shape=shape)
    if types.is_binary(type) and not field.nbytes():
        return field, partial(_nothing, dtype=field.dtype, shape=shape)
    sizes, inner = _sizes(type)
    if sizes and math.prod(size or 0 for size in sizes) == math.prod(shape) > 0 and _number(inner) == field.dtype:
        return field, partial(_blocks, dtype=field.dtype, shape=shape)
    return None


def _tensor(type: Any, dtype: str) -> _Reader:
    order = type.permutation or list(range(len(type.shape)))
    shape = tuple(type.shape[axis] for axis in order)
    return Field("array", dtype, shape), partial(_blocks, dtype=dtype, shape=tuple(type.shape), order=tuple(order))


def _fits(dtype: str, shape: tuple[int | None, ...]) -> bool:
    return math.prod(size or 1 for size in shape) * (np.dtype(dtype).itemsize if dtype else 1) <= _MOST_NBYTES


def _stored(make: Callable[[Any], Column], array: Any) -> Column:
    return make(array.storage)


def _number(type: Any) -> str:
    """Return NumPy's name of a number type; "" of any other."""
    return _NUMBERS.get(str(type).partition("[")[0], "")


def _sizes(type: Any) -> tuple[list[int | None], Any]:
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


class _Blocks(Column):
    """Numbers, or arrays of one shape."""

    def __init__(self, valid: np.ndarray | None, values: np.ndarray, holes: np.ndarray | None = None) -> None:
        super().__init__(valid)
        self._values = values
        self._holes = holes

    def value(self, row: int) -> Any:
        """Return a number, or a view of an array."""
        if self._holes is not None and self._holes[row]:
            raise SourceError("it has nulls between its numbers")
        return self._values[row]


def _blocks(array: Any, dtype: str, shape: tuple[int, ...] = (), order: tuple[int, ...] = ()) -> Column:
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
    return _Blocks(valid, values, holes)


def _raw_blocks(array: Any, dtype: str, shape: tuple[int, ...]) -> Column:
    """Return a column of arrays' bytes, all of one size."""
    cells = _Cells(array)
    values = np.frombuffer(cells.data, dtype).reshape(len(array), *shape)
    values.flags.writeable = False
    return _Blocks(cells.valid, _checked(values))


def _nothing(array: Any, dtype: str, shape: tuple[int, ...]) -> Column:
    """Return a column of arrays without a number."""
    return _Blocks(_valid(array), np.empty((len(array), *shape), dtype))


class _Cells(Column):
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


class _Spans(Column):
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


class _Coded(Column):
    """Numbers of entries in a dictionary."""

    def __init__(self, make: Callable[[Any], Column], array: Any) -> None:
        super().__init__(_valid(array))
        self._entries = make(array.dictionary)
        self._numbers = _flat(array.indices, _number(array.type.index_type))
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
                raise SourceError("its rows have different lengths, and so are no array")
        if self.holes is not None and not self.holes[begin:end].all():
            raise SourceError("it has nulls between its numbers")
        return begin, end, size


class _Ragged(Column):
    """Nested lists, of different sizes."""

    def __init__(self, array: Any, dtype: str) -> None:
        super().__init__(_valid(array))
        self._levels = []
        while _sizes(array.type)[0]:
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


class _Shaped(Column):
    """Arrays with their shapes beside them."""

    def __init__(self, array: Any, field: Field, is_raw: bool) -> None:
        super().__init__(_valid(array))
        data, shapes = array.field(0), array.field(1)
        self._field = field
        self._data: Column = _Spans(data) if is_raw else _Ragged(data, field.dtype)
        self._shapes = _blocks(shapes, "int32", (len(field.shape),))
        self._inner = [one.valid for one in (self._data, self._shapes) if one.valid is not None]

    def value(self, row: int) -> Any:
        """Return a view of an array."""
        if not all(valid[row] for valid in self._inner):
            raise SourceError("its data or its shape is null")
        shape = tuple(self._shapes.value(row).tolist())
        if isinstance(self._data, _Spans):
            raw = self._data.raw(row)
            if len(raw) % np.dtype(self._field.dtype).itemsize:
                raise SourceError(f"{len(raw)} bytes are no array of {self._field.dtype}")
            values = _checked(np.frombuffer(raw, self._field.dtype))
            values.flags.writeable = False
        else:
            values = self._data.value(row)
        if min(shape) < 0 or math.prod(shape) != len(values) or not _fits(self._field.dtype, shape):
            raise SourceError(f"it has {len(values)} numbers, and the shape {shape}")
        if any(one not in (None, other) for one, other in zip(self._field.shape, shape, strict=True)):
            raise SourceError(f"its shape is {shape}, and it should be {self._field.words()}")
        return values.reshape(shape)


def _check_offsets(offsets: np.ndarray, end: int) -> None:
    """Raise SourceError unless offsets ascend, and end where what they point to does, or before."""
    if offsets.size and (offsets[0] < 0 or (offsets[1:] < offsets[:-1]).any() or offsets[-1] > end):
        raise SourceError("a column's values lie outside of what holds them")


def _checked(values: np.ndarray) -> np.ndarray:
    """Return bytes that are taken for numbers: of bool, they have to be 0 or 1."""
    if values.dtype.kind == "b" and values.size and values.view(np.uint8).max() > 1:
        raise SourceError("it is bool, and holds bytes that are neither 0 nor 1")
    return values
