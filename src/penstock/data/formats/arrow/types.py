"""Which fields the samples of an Arrow table have, and what reads their columns.

    number    a column of a number type; dates, times and durations are their integers, in the column's unit, which the
              schema states. Files in different units are read in the finest of them, and numbers of different types
              in one that holds both exactly; see `common_type`
    text      utf8, large_utf8, utf8_view
    bytes     binary, large_binary, binary_view, fixed_size_binary
    array     lists, large lists and lists of a fixed size of numbers, nested or not, as long as they form a block;
              arrow.fixed_shape_tensor, arrow.variable_shape_tensor
    struct    not a value: its fields are, under names as "image/bytes"
    object    all else, as pyarrow makes it Python's: lists of text, lists of structs (dicts), maps (pairs), Decimal.
              `objects=` makes any column one: lists that are no block, or hold nulls

Text, bytes and objects that are null are None; null numbers and arrays are errors, unless `null=` replaces them.
A dictionary-encoded column is what its dictionary is. A column without a type, as all its rows are null, is what it is
in the other files, and left out where no file has a type for it.

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
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from penstock.core.errors import SourceError
from penstock.data.formats.arrow.columns import (
    dictionary_column,
    empty_column,
    fits_in_memory,
    fixed_shape_column,
    python_column,
    ragged_column,
    raw_column,
    tensor_column,
)
from penstock.data.optional import need
from penstock.data.rows import Column
from penstock.data.schema import Field, common_dtype

Layout = Literal["tensors", "raw"]

ARRAY_METADATA = b"penstock.array"
UNTYPED = Field("object", unit="null")
"""A column without a type, as all its rows are null."""
VARIABLE_TENSOR = b"arrow.variable_shape_tensor"
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

_DEEPEST = 32
_ARRAY = re.compile(r"(\w{1,16})\[((?:\?|\d{1,15})(?:, (?:\?|\d{1,15})){0,31})\]")
_UNIT = re.compile(r"(timestamp|duration|date32|date64|time32|time64)\[(\w+)(?:, tz=(.+))?\]")
_EXTENSION = b"ARROW:extension:name"
_EXTENSION_METADATA = b"ARROW:extension:metadata"
_SAME_OBJECTS = {"large_string": "string", "string_view": "string", "large_binary": "binary", "binary_view": "binary"}
_LARGE = {"string": "large_string", "binary": "large_binary"}
_AS_BYTES = {"string": "binary", "large_string": "large_binary"}

Reader = tuple[Field, Callable[[Any], Column]]
"""What a column holds, and what makes a column of its array."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A field that samples can have."""

    field: Field
    path: tuple[str, ...]
    """The column's name, then those of structs' fields."""
    make: Callable[[Any], Column]
    type: Any
    """Arrow's, in the file."""

    def column(self, batch: Any) -> Column:
        """Return the field's column of a record batch."""
        array = batch.column(self.path[0])
        for name in self.path[1:]:
            array = array.flatten()[array.type.get_field_index(name)]
        if array.type != self.type:
            raise SourceError(f"it is {str(array.type)[:200]}, and {str(self.type)[:200]} in the file's schema")
        if self.field.kind == "number":  # of dates and times a full check looks at values, too
            array.validate()
        else:
            _validate(array, is_text=self.field.kind == "text")
        return self.make(array)

    def read_as(self, other: Leaf) -> Leaf:
        """Return what reads this file's column in the unit of `other`; if it has no type, as nulls of that type."""
        if self.field == other.field:
            return self
        return replace(self, field=other.field, make=partial(_cast_column, other.type, other.make))


def _validate(array: Any, *, is_text: bool) -> None:
    """Raise what pyarrow does of a buffer that is too small, or of offsets and indices that lead out of one."""
    if is_text and str(array.type) in _AS_BYTES:  # not whether all of it is UTF-8
        array = array.view(_AS_BYTES[str(array.type)])
    array.validate(full=not hasattr(array, "dictionary"))  # `dictionary_column` looks at the indices


def _cast_column(type: Any, make: Callable[[Any], Column], array: Any) -> Column:
    pa = need("pyarrow", "parquet")
    if pa.types.is_null(array.type):
        array = pa.nulls(len(array), type)
    return make(array if array.type == type else array.cast(type))


# ── the fields of a schema ──────────────────────────────────────────────────────────────────────────────────


def leaves(schema: Any, objects: Collection[str] = ()) -> dict[str, Leaf | str]:
    """Return the fields that samples of an Arrow schema can have; for those that cannot be read, why.

    Args:
        schema: Arrow's.
        objects: names of columns that are Python objects whatever their types are; of structs, dicts.
    """
    found: dict[str, Leaf | str] = {}
    for field in schema:
        _add_leaves(field, (field.name,), found, objects)
    return found


def _add_leaves(field: Any, path: tuple[str, ...], found: dict[str, Leaf | str], objects: Collection[str]) -> None:
    name, is_object = "/".join(path), "/".join(path) in objects
    reader = _object_reader(field.type) if is_object else _reader(field)
    is_struct = need("pyarrow", "parquet").types.is_struct(field.type) and field.type.num_fields
    if name in found:
        found[name] = "two columns have this name"
    elif isinstance(reader, str):
        found[name] = reader
    elif not fits_in_memory(reader[0]):
        found[name] = f"it is {reader[0].words()}, which is larger than any memory"
    elif reader[0].kind == "object" and not is_object and is_struct and len(path) < _DEEPEST:
        for inner in field.type:
            _add_leaves(inner, (*path, inner.name), found, objects)
    else:
        found[name] = Leaf(reader[0], path, reader[1], field.type)


def _reader(field: Any) -> Reader | str:
    """Return what a column holds and what reads it, or why nothing does."""
    pa = need("pyarrow", "parquet")
    type, metadata = field.type, field.metadata or {}
    if isinstance(type, pa.BaseExtensionType):
        metadata |= {_EXTENSION: type.extension_name.encode(), _EXTENSION_METADATA: str(type).encode()}
        reader = _reader(pa.field("", type.storage_type, metadata=metadata))
        if isinstance(reader, str):
            return reader
        if isinstance(type, pa.FixedShapeTensorType):
            order = type.permutation or list(range(len(type.shape)))
            field = Field("array", reader[0].dtype, tuple(type.shape[axis] for axis in order))
            make = partial(fixed_shape_column, dtype=field.dtype, shape=tuple(type.shape), order=tuple(order))
            reader = field, make
        return reader[0], partial(_storage_column, reader[1])
    if ARRAY_METADATA in metadata or metadata.get(_EXTENSION) == VARIABLE_TENSOR:
        return _array_reader(type, metadata)
    if pa.types.is_dictionary(type):
        reader = _reader(pa.field("", type.value_type))
        return reader if isinstance(reader, str) else (reader[0], partial(_dictionary_column, reader[1]))
    kind = _SAME_OBJECTS.get(str(type), str(type).partition("[")[0])
    if kind in ("string", "binary", "fixed_size_binary"):
        return Field("text" if kind == "string" else "bytes"), python_column
    sizes, inner = _list_sizes(type)
    dtype, unit = number_type(inner), _unit(inner)
    if not dtype:
        return _object_reader(type)
    if None in sizes:
        return Field("array", dtype, tuple(sizes), unit), partial(ragged_column, dtype=dtype, sizes=sizes)
    make = partial(fixed_shape_column, dtype=dtype, shape=tuple(size or 0 for size in sizes))
    return Field("array" if sizes else "number", dtype, tuple(sizes), unit), make


def _object_reader(type: Any) -> Reader:
    return Field("object", unit=_describe(type)), python_column


def _storage_column(make: Callable[[Any], Column], array: Any) -> Column:
    return make(array.storage)


def _dictionary_column(make: Callable[[Any], Column], array: Any) -> Column:
    _validate(array.dictionary, is_text=True)
    return dictionary_column(array, make)


def _array_reader(type: Any, metadata: dict[bytes, bytes]) -> Reader | str:
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
        reader = _tensor_reader(type, field)
    else:
        reader = _fixed_shape_reader(type, field)
    return reader or f"its metadata are {words!r}, and its type is {str(type)[:200]}"


def _tensor_reader(type: Any, field: Field | None) -> Reader | None:
    """Return what reads a struct of data and shape; None where it is something else."""
    types = need("pyarrow", "parquet").types
    if [inner.name for inner in type] != ["data", "shape"]:
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
    return field, partial(tensor_column, field=field, is_raw=types.is_binary(data))


def _fixed_shape_reader(type: Any, field: Field | None) -> Reader | None:
    """Return what reads arrays of one shape; None where the column does not hold them."""
    types = need("pyarrow", "parquet").types
    if field is None or field.is_ragged:
        return None
    shape = tuple(size or 0 for size in field.shape)
    if types.is_fixed_size_binary(type) and type.byte_width == field.nbytes() > 0:
        return field, partial(raw_column, dtype=field.dtype, shape=shape)
    if types.is_binary(type) and not field.nbytes():
        return field, partial(empty_column, dtype=field.dtype, shape=shape)
    sizes, inner = _list_sizes(type)
    if sizes and math.prod(size or 0 for size in sizes) == math.prod(shape) > 0 and number_type(inner) == field.dtype:
        return field, partial(fixed_shape_column, dtype=field.dtype, shape=shape)
    return None


# ── types ───────────────────────────────────────────────────────────────────────────────────────────────────


def number_type(type: Any) -> str:
    """Return NumPy's name of a number type; "" of any other."""
    return NUMBER_TYPES.get(str(type).partition("[")[0], "")


def _unit(type: Any) -> str:
    """Return what a number type says beyond its size, as in "timestamp[us, tz=UTC]"; "" if nothing."""
    return str(type) if "[" in str(type) else ""


def _list_sizes(type: Any) -> tuple[list[int | None], Any]:
    """Return the sizes of nested lists, None where they differ, and the type that the innermost has."""
    sizes: list[int | None] = []
    while len(sizes) < _DEEPEST and _is_list(type):
        sizes.append(getattr(type, "list_size", None))
        type = type.value_type
    return sizes, type


def _is_list(type: Any) -> bool:
    types = need("pyarrow", "parquet").types
    return bool(types.is_list(type) or types.is_large_list(type) or types.is_fixed_size_list(type))


def _describe(type: Any) -> str:
    """Return what the Python objects of a type are, whatever the layout is that Arrow holds them in.

    >>> pa = need("pyarrow", "parquet")
    >>> _describe(pa.large_list(pa.struct({"role": pa.large_string(), "content": pa.string()})))
    'list<struct<role: string, content: string>>'
    """
    types = need("pyarrow", "parquet").types
    if types.is_dictionary(type):
        return _describe(type.value_type)
    if types.is_map(type):
        return f"map<{_describe(type.key_type)}, {_describe(type.item_type)}>"
    if types.is_struct(type):
        return f"struct<{', '.join(f'{inner.name}: {_describe(inner.type)}' for inner in type)}>"
    if types.is_nested(type) and hasattr(type, "value_type"):
        return f"list<{_describe(type.value_type)}>"
    return _SAME_OBJECTS.get(str(type), str(type))


def unit_type(unit: str) -> Any:
    """Return the type of numbers with a unit, as `Field.unit` states it; None for a unit that is not Arrow's.

    >>> unit_type("timestamp[us, tz=UTC]"), unit_type("date32[day]"), unit_type("")
    (TimestampType(timestamp[us, tz=UTC]), DataType(date32[day]), None)
    """
    found = _UNIT.fullmatch(unit)
    if found is None:
        return None
    pa = need("pyarrow", "parquet")
    if found[1] == "timestamp":
        return pa.timestamp(found[2], found[3])
    return getattr(pa, found[1])(*([] if found[1].startswith("date") else [found[2]]))


# ── one type for several files ──────────────────────────────────────────────────────────────────────────────


def merged(one: Leaf, other: Leaf) -> Leaf | None:
    """Return the field of two files that differ in type, in one that holds both exactly; None if there is none."""
    if UNTYPED in (one.field, other.field):
        return other if one.field == UNTYPED else one
    pa, type = need("pyarrow", "parquet"), common_type(one.type, other.type)
    if type is None:
        return None
    if one.field.kind == other.field.kind == "object":
        return Leaf(_object_reader(type)[0], one.path, python_column, type)
    own = [_reader(pa.field("", leaf.type))[0] for leaf in (one, other)]
    reader = _reader(pa.field("", type))
    if isinstance(reader, str) or own != [one.field, other.field]:  # its metadata say what it is
        return None
    return Leaf(reader[0], one.path, reader[1], type)


def common_type(one: Any, other: Any) -> Any:
    """Return the type that holds the values of two exactly; None if there is none.

    Timestamps with a time zone are instants, in UTC; whether there is a zone is not a matter of unit.

    >>> pa = need("pyarrow", "parquet")
    >>> common_type(pa.timestamp("us"), pa.timestamp("ns")), common_type(pa.timestamp("us"), pa.timestamp("us", "UTC"))
    (TimestampType(timestamp[ns]), None)
    """
    pa = need("pyarrow", "parquet")
    types = pa.types
    one, other = (type.value_type if types.is_dictionary(type) else type for type in (one, other))
    if _describe(one) == _describe(other) and _describe(one) in _LARGE:
        return one if one == other else pa.type_for_alias(_LARGE[_describe(one)])
    if types.is_timestamp(one) and types.is_timestamp(other) and one.tz and other.tz and one.tz != other.tz:
        one, other = (pa.timestamp(type.unit, "UTC") for type in (one, other))
    try:
        schemas = [pa.schema([("", type)]) for type in (one, other)]
        wide = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None
    return wide if _holds(wide, one) and _holds(wide, other) else None


def _holds(wide: Any, own: Any) -> bool:
    """Return whether a type that Arrow promotes another to holds all values exactly: of int64 it makes float64, too."""
    types = need("pyarrow", "parquet").types
    if wide == own or types.is_null(own):
        return True
    if types.is_struct(wide):
        names = [field.name for field in own]
        if sorted(names) != sorted(field.name for field in wide):
            return False
        return all(_holds(wide.field(name).type, own.field(name).type) for name in names)
    if types.is_map(wide):
        return _holds(wide.key_type, own.key_type) and _holds(wide.item_type, own.item_type)
    if _is_list(wide):
        return _holds(wide.value_type, own.value_type)
    if number_type(own) and not _unit(own):
        return bool(number_type(wide)) and common_dtype(number_type(own), number_type(wide)) == number_type(wide)
    return _describe(wide) == _describe(own) or _describe(wide) not in _LARGE  # text is no bytes
