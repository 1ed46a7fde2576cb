"""How penstock stores the fields of a sample in LMDB, TFRecord and tar: their types as JSON, and values as bytes.

The types are {NAME: [kind, dtype, shape]}, as in `Field`; a size that differs from sample to sample is null. A value is

    array, number    its bytes in C order, little-endian
    text             UTF-8
    bytes            as they are

Nothing of it is ever executed, and every size is checked against the bytes that are there before it is used.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.schema import DTYPES, Field, Schema

_KINDS = ("array", "number", "text", "bytes")
_MOST_DIMENSIONS = 32
_STORED = {name: np.dtype(name).newbyteorder("<") for name in DTYPES}


def why_unsupported(schema: Schema) -> str:
    """Return why values of this schema would not come back as they were; "" if they would.

    >>> why_unsupported({"x": Field("array", "float16", (None, 2))})
    ''
    >>> why_unsupported({"x": Field("number", "longdouble")})
    "field 'x' is longdouble, which has no portable layout"
    """
    for name, field in schema.items():
        if field.kind in ("array", "number") and field.dtype not in DTYPES:
            return f"field {name!r} is {field.words()}, which has no portable layout"
        if len(field.shape) > _MOST_DIMENSIONS:
            return f"field {name!r} has {len(field.shape)} dimensions; {_MOST_DIMENSIONS} are the most"
    return ""


def fields_to_json(schema: Schema) -> dict[str, Any]:
    """Return the types of fields, as `json.dumps` takes them."""
    return {name: [field.kind, field.dtype, field.shape] for name, field in schema.items()}


def fields_from_json(found: Any) -> Schema:
    """Return the types of fields that `json.loads` found.

    Raises:
        ValueError: it is something else, or an impossible type.

    >>> fields_from_json({"x": ["array", "int8", [2, None]]})["x"].words()
    'int8[2, ?]'
    """
    try:
        schema = {name: Field(kind, dtype, tuple(shape)) for name, (kind, dtype, shape) in found.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"its list of fields cannot be understood: {error}") from error
    for name, field in schema.items():
        are_sizes = all(size is None or (type(size) is int and size >= 0) for size in field.shape)
        is_known = field.kind in _KINDS and field.dtype in (DTYPES if field.kind in ("array", "number") else ("",))
        if not is_known or not are_sizes or len(field.shape) > _MOST_DIMENSIONS:
            raise ValueError(f"its list of fields has an impossible one, {name!r}: {str(field)[:200]}")
    return schema


def to_bytes(field: Field, value: Any) -> bytes:
    r"""Return a value that fits its field as bytes.

    Raises:
        SourceError: a text is no UTF-8.

    >>> to_bytes(Field("number", "int16"), 258)
    b'\x02\x01'
    """
    if field.kind == "bytes":
        return bytes(value)
    if field.kind == "text":
        try:
            return bytes(value.encode())
        except UnicodeEncodeError as error:
            raise SourceError(f"a text is no UTF-8: {error}") from error
    return np.asarray(value, _STORED[field.dtype]).tobytes()


def from_bytes(field: Field, data: Any, shape: tuple[Any, ...] = ()) -> Any:
    r"""Return the value that `data` holds, a buffer; an array is a view of it.

    Raises:
        ValueError: it is no UTF-8, or does not have the bytes that the shape takes.

    >>> from_bytes(Field("array", "int16", (None,)), b"\x02\x01", (1,))
    array([258], dtype=int16)
    """
    if field.kind == "bytes":
        return bytes(data)
    if field.kind == "text":
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"it is no UTF-8: {error}") from error
    dtype, nbytes = _STORED[field.dtype], memoryview(data).nbytes
    if nbytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"it has {nbytes} bytes for the shape {shape} of {field.dtype}")
    try:
        array: np.ndarray = np.ndarray(shape, dtype, data)
    except (ValueError, OverflowError) as error:  # no bytes, and yet a dimension that is too large
        raise ValueError(f"it cannot have the shape {shape}: {error}") from error
    if field.dtype == "bool" and nbytes and array.view(np.uint8).max() > 1:
        raise ValueError("it is bool, and holds bytes that are neither 0 nor 1")
    return array if field.kind == "array" else array[()]
