"""Fields as files that penstock wrote state them, JSON {NAME: [kind, dtype, shape]} as in `Field`; values as bytes.

TFRecord, tar and LMDB have such a schema, as they have none of their own. None of it is believed: what it states is
checked before memory is taken for it.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from penstock.data.schema import Field, Schema

MAX_DIMENSIONS = 64
_KINDS = ("array", "number", "text", "bytes")


def parse_fields(text: str | bytes) -> tuple[Any, Schema]:
    """Return what JSON holds, and the schema that it, or its member "fields", is.

    Raises:
        ValueError: it is none.

    >>> parse_fields('{"x": ["array", "int8", [null, 3]]}')[1]["x"].words()
    'int8[?, 3]'
    """
    try:
        found = json.loads(text)
        members = found["fields"] if isinstance(found.get("fields"), dict) else found
        fields = {name: Field(kind, dtype, tuple(shape)) for name, (kind, dtype, shape, *_) in members.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"cannot be understood: {error}") from error
    for field in fields.values():
        sizes = all(size is None or (type(size) is int and size >= 0) for size in field.shape)
        if field.kind not in _KINDS or not sizes or len(field.shape) > MAX_DIMENSIONS:
            raise ValueError(f"lists an impossible field {field}")
        if field.kind in ("array", "number") and not _is_number_type(field.dtype):
            raise ValueError(f"lists the dtype {field.dtype!r}")
    return found, fields


def _is_number_type(name: object) -> bool:
    try:
        dtype = np.dtype(name) if isinstance(name, str) else None
    except (TypeError, ValueError, SyntaxError):
        return False
    return dtype is not None and dtype.name == name and dtype.kind in "biufc"


def array_of(raw: Any, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    r"""Return the array whose bytes these are, little-endian and in C order: a view of them.

    Raises:
        ValueError: it takes other bytes, or is larger than any memory.

    >>> array_of(b"\1\0\2\0", "int16", (2, 1)).tolist()
    [[1], [2]]
    """
    little = np.dtype(dtype).newbyteorder("<")
    if math.prod(shape) * little.itemsize != len(raw):
        raise ValueError(f"has {len(raw)} bytes for the shape {str(shape)[:80]} of {dtype}")
    try:
        array: np.ndarray = np.ndarray(shape, little, raw)
    except (ValueError, OverflowError) as error:  # no bytes, and yet a dimension that is too large
        raise ValueError(f"cannot have the shape {str(shape)[:80]}: {error}") from error
    if little.kind == "b" and array.size and array.view(np.uint8).max() > 1:
        raise ValueError("is bool, and holds bytes that are neither 0 nor 1")
    return array
