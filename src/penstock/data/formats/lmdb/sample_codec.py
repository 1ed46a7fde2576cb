"""One sample as bytes, and back: what an LMDB value holds.

    offset 0    4 bytes   "PSK" and a byte 2: magic, version
           4    uint32    CRC-32 of everything behind it
           8    uint32    bytes of the header
          12    header    the sample's fields as JSON, see stored_fields.py; the shape of text and bytes is [bytes]
                values    in the fields' order; each begins at a multiple of 16

Integers are little-endian. A value is an array's or a number's bytes (C order, little-endian), text in UTF-8, or bytes.
Nothing of it is ever executed, and every size is checked against the bytes that are there before it is used.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats.stored_fields import MAX_DIMENSIONS, array_of, parse_fields
from penstock.data.schema import DTYPES, Field, Sample, Schema, field_of, plain

MAGIC = b"PSK\x02"
_PREFIX = struct.Struct("<4sII")
_ALIGNMENT = 16
_MAX_HEADER_NBYTES = 1 << 20


def why_unsupported(schema: Schema) -> str:
    """Return why samples of this schema would not come back as they were; "" if they would.

    >>> why_unsupported({"x": Field("array", "float16", (None, 2))})
    ''
    >>> why_unsupported({"x": Field("number", "longdouble")})
    "field 'x' is longdouble, which has no portable layout"
    """
    for name, field in schema.items():
        if field.kind in ("array", "number") and field.dtype not in DTYPES:
            return f"field {name!r} is {field.words()}, which has no portable layout"
        if len(field.shape) > MAX_DIMENSIONS:
            return f"field {name!r} has {len(field.shape)} dimensions; {MAX_DIMENSIONS} are the most"
    return ""


def pack(sample: Sample) -> bytes:
    """Return a sample as bytes.

    Raises:
        SourceError: a field holds something else than numbers, text or bytes.

    >>> unpack(pack({"x": np.arange(3), "name": "a"}))
    {'x': array([0, 1, 2]), 'name': 'a'}
    """
    fields, values = {}, []
    for name, value in sample.items():
        field, raw = _encode(name, plain(value))
        fields[name] = [field.kind, field.dtype, field.shape if field.dtype else [len(raw)]]
        values.append(raw)
    header = json.dumps(fields, separators=(",", ":")).encode()
    if len(header) > _MAX_HEADER_NBYTES:
        raise SourceError(
            f"{len(sample)} fields need a header of {len(header)} bytes; {_MAX_HEADER_NBYTES} are the most"
        )
    parts, at = [struct.pack("<I", len(header)), header], _PREFIX.size + len(header)
    for raw in values:
        parts += [bytes(-at % _ALIGNMENT), raw]
        at += -at % _ALIGNMENT + len(raw)
    body = b"".join(parts)
    return MAGIC + struct.pack("<I", zlib.crc32(body)) + body


def unpack(data: Any) -> Sample:
    """Return the sample that `data` holds, as bytes, bytearray or memoryview; arrays are views of it.

    Raises:
        SourceError: it is truncated or corrupt, or no sample at all.
    """
    view = memoryview(data)
    if len(view) < _PREFIX.size:
        raise SourceError(f"{len(view)} bytes are too few for a packed sample")
    magic, crc, nbytes = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise SourceError(f"it begins with {magic!r}, and a packed sample with {MAGIC!r}")
    if nbytes > min(len(view) - _PREFIX.size, _MAX_HEADER_NBYTES):
        raise SourceError(f"a header of {nbytes} bytes does not fit: there are {len(view)} bytes in all")
    if zlib.crc32(view[8:]) != crc:
        raise SourceError("its CRC-32 does not match: it is truncated or corrupt")
    fields, end = _layout(bytes(view[_PREFIX.size : _PREFIX.size + nbytes]))
    if end != len(view):
        raise SourceError(f"it needs {end} bytes, and has {len(view)}")
    sample: Sample = {}
    for name, field, start, stop in fields:
        try:
            sample[name] = _decode(field, view[start:stop])
        except ValueError as error:
            raise SourceError(f"field {name!r} {error}") from error
    return sample


def _encode(name: str, value: Any) -> tuple[Field, bytes]:
    field = field_of(value)
    why = why_unsupported({name: field})
    if why:
        raise SourceError(why)
    if field.dtype:
        return field, value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
    try:
        return field, value if field.kind == "bytes" else value.encode()
    except UnicodeEncodeError as error:
        raise SourceError(f"field {name!r} is no valid text: {error}") from error


def _decode(field: Field, raw: memoryview) -> Any:
    if field.kind == "bytes":
        return bytes(raw)
    if field.kind == "text":
        return str(raw, "utf-8")
    array = array_of(raw, field.dtype, field.shape)  # type: ignore[arg-type]  # no size is None
    return array if field.kind == "array" else array[()]


@lru_cache(maxsize=64)
def _layout(header: bytes) -> tuple[list[tuple[str, Field, int, int]], int]:
    """Return fields and where each begins and ends, and where the sample ends. Samples of one shape share this."""
    try:
        fields = parse_fields(header)[1]
    except ValueError as error:
        raise SourceError(f"its header {error}") from error
    places, end = [], _PREFIX.size + len(header)
    for name, field in fields.items():
        is_numbers = field.kind in ("array", "number")
        is_known = field.dtype in DTYPES if is_numbers else not field.dtype and len(field.shape) == 1
        if not is_known or field.is_ragged or (field.kind == "number" and field.shape):
            raise SourceError(f"its header lists {name!r} as {field}")
        start = end + -end % _ALIGNMENT
        end = start + math.prod(size or 0 for size in field.shape) * np.dtype(field.dtype or "u1").itemsize
        places.append((name, field, start, end))
    return places, end
