"""Which fields the samples of an Arrow table have, and what reads their columns.

    number    a column of a number type; dates, times and durations are their integers, in the column's unit
    text      utf8, large_utf8, utf8_view
    bytes     binary, large_binary, binary_view, fixed_size_binary
    array     lists, large lists and lists of a fixed size of numbers, nested or not, as long as they form a block;
              arrow.fixed_shape_tensor, arrow.variable_shape_tensor
    struct    not a value: its fields are, under names as "image/bytes"

A dictionary-encoded column is what its dictionary is. Decimals, maps, unions, lists of text are not read, and named.

writer.py writes arrays of numbers as one of

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

from penstock.data.formats.arrow.columns import (
    NUMBER_TYPES,
    Column,
    DictionaryEncoded,
    FixedSizeBytes,
    Ragged,
    TensorWithShape,
    VariableSizeBytes,
    empty_column,
    fits_in_memory,
    fixed_shape_column,
    list_sizes,
    number_type,
    raw_column,
)
from penstock.data.optional import need
from penstock.data.schema import Field

Layout = Literal["tensors", "raw"]

ARRAY_METADATA = b"penstock.array"
VARIABLE_TENSOR = b"arrow.variable_shape_tensor"
_ARRAY = re.compile(r"(\w{1,16})\[((?:\?|\d{1,15})(?:, (?:\?|\d{1,15})){0,31})\]")
_EXTENSION = b"ARROW:extension:name"
_EXTENSION_METADATA = b"ARROW:extension:metadata"
_DEEPEST = 32


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
        _add_leaves(field, (field.name,), found)
    return found


def _add_leaves(field: Any, path: tuple[str, ...], found: dict[str, Leaf | str]) -> None:
    name = "/".join(path)
    reader = _reader(field)
    if name in found:
        found[name] = "two columns have this name"
    elif not isinstance(reader, str) and not fits_in_memory(reader[0].dtype, reader[0].shape):
        found[name] = f"it is {reader[0].words()}, which is larger than any memory"
    elif not isinstance(reader, str):
        found[name] = Leaf(reader[0], path, reader[1])
    elif need("pyarrow", "parquet").types.is_struct(field.type) and len(path) < _DEEPEST:
        for number in range(field.type.num_fields):
            _add_leaves(field.type.field(number), (*path, field.type.field(number).name), found)
    else:
        found[name] = reader


_Reader = tuple[Field, Callable[[Any], Column]]


def _reader(field: Any) -> _Reader | str:
    """Return what a column holds and what reads it, or why nothing does."""
    pa = need("pyarrow", "parquet")
    type, metadata = field.type, field.metadata or {}
    if isinstance(type, pa.BaseExtensionType):
        metadata |= {_EXTENSION: type.extension_name.encode(), _EXTENSION_METADATA: str(type).encode()}
        reader = _reader(pa.field("", type.storage_type, metadata=metadata))
        if isinstance(reader, str):
            return reader
        if isinstance(type, pa.FixedShapeTensorType):
            reader = _tensor(type, reader[0].dtype)
        return reader[0], partial(_storage_column, reader[1])
    if ARRAY_METADATA in metadata or metadata.get(_EXTENSION) == VARIABLE_TENSOR:
        return _penstock_array(type, metadata)
    if pa.types.is_dictionary(type):
        reader = _reader(pa.field("", type.value_type))
        return reader if isinstance(reader, str) else (reader[0], partial(DictionaryEncoded, reader[1]))
    if pa.types.is_string(type) or pa.types.is_large_string(type) or pa.types.is_string_view(type):
        return Field("text"), partial(VariableSizeBytes, is_text=True)
    if pa.types.is_binary(type) or pa.types.is_large_binary(type) or pa.types.is_binary_view(type):
        return Field("bytes"), VariableSizeBytes
    if pa.types.is_fixed_size_binary(type):
        return Field("bytes"), FixedSizeBytes
    sizes, inner = list_sizes(type)
    dtype = number_type(inner)
    if not dtype:
        return f"it is {str(type)[:200]}, which is no number, text or bytes, nor an array of numbers"
    found = Field("array", dtype, tuple(sizes)) if sizes else Field("number", dtype)
    if None in sizes:
        return found, partial(Ragged, dtype=dtype)
    return found, partial(fixed_shape_column, dtype=dtype, shape=tuple(size or 0 for size in sizes))


def _penstock_array(type: Any, metadata: dict[bytes, bytes]) -> _Reader | str:
    """Return what reads an array with dtype and shape in its column's metadata, or with its shape beside it."""
    words = metadata.get(ARRAY_METADATA, b"").decode("ascii", "replace")
    found = _ARRAY.fullmatch(words)
    if words and (found is None or found[1] not in NUMBER_TYPES.values()):
        return f"its metadata are {words[:100]!r}, which describes no array"
    field = None
    if found is not None:
        field = Field("array", found[1], tuple(None if size == "?" else int(size) for size in found[2].split(", ")))
    if need("pyarrow", "parquet").types.is_struct(type):
        if b"permutation" in metadata.get(_EXTENSION_METADATA, b""):
            return "it is a tensor whose axes are permuted"
        reader = _tensor_with_shape(type, field)
    else:
        reader = _fixed_shape_array(type, field)
    return reader or f"its metadata are {words!r}, and its type is {str(type)[:200]}"


def _tensor_with_shape(type: Any, field: Field | None) -> _Reader | None:
    """Return what reads a struct of data and shape; None where it is something else."""
    types = need("pyarrow", "parquet").types
    if [type.field(number).name for number in range(type.num_fields)] != ["data", "shape"]:
        return None
    data, shape = type.field(0).type, type.field(1).type
    if not types.is_fixed_size_list(shape) or not types.is_int32(shape.value_type):
        return None
    if types.is_list(data) or types.is_large_list(data):
        dtype = number_type(data.value_type)
        field = field or Field("array", dtype, (None,) * shape.list_size)
        if not dtype or dtype != field.dtype:
            return None
    elif field is None or not types.is_binary(data):
        return None
    if not field.shape or len(field.shape) != shape.list_size:
        return None
    return field, partial(TensorWithShape, field=field, is_raw=types.is_binary(data))


def _fixed_shape_array(type: Any, field: Field | None) -> _Reader | None:
    """Return what reads arrays of one shape; None where the column does not hold them."""
    types = need("pyarrow", "parquet").types
    if field is None or field.is_ragged:
        return None
    shape = tuple(size or 0 for size in field.shape)
    if types.is_fixed_size_binary(type) and type.byte_width == field.nbytes() > 0:
        return field, partial(raw_column, dtype=field.dtype, shape=shape)
    if types.is_binary(type) and not field.nbytes():
        return field, partial(empty_column, dtype=field.dtype, shape=shape)
    sizes, inner = list_sizes(type)
    if sizes and math.prod(size or 0 for size in sizes) == math.prod(shape) > 0 and number_type(inner) == field.dtype:
        return field, partial(fixed_shape_column, dtype=field.dtype, shape=shape)
    return None


def _tensor(type: Any, dtype: str) -> _Reader:
    order = type.permutation or list(range(len(type.shape)))
    shape = tuple(type.shape[axis] for axis in order)
    return Field("array", dtype, shape), partial(
        fixed_shape_column, dtype=dtype, shape=tuple(type.shape), order=tuple(order)
    )


def _storage_column(make: Callable[[Any], Column], array: Any) -> Column:
    return make(array.storage)
