"""One sample as bytes, and back: what an LMDB value holds.

    offset 0    4 bytes   "PSK" and a byte 1: magic, version
           4    uint32    CRC-32 of everything behind it
           8    uint32    bytes of the header
          12    header    JSON: types as in stored_fields.py; of text and bytes the shape is the length
                values    in the fields' order; each begins at a multiple of 16

Integers are little-endian.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats.stored_fields import fields_from_json, fields_to_json, from_bytes, to_bytes, why_unsupported
from penstock.data.schema import Field, Sample, plain, schema_of

MAGIC = b"PSK\x01"

_PREFIX = struct.Struct("<4sII")
_ALIGNMENT = 16
_MOST_HEADER_NBYTES = 1 << 20


def pack(sample: Sample) -> bytes:
    """Return a sample as bytes.

    Raises:
        SourceError: a field holds something else than numbers, text or bytes.

    >>> unpack(pack({"x": np.arange(3), "name": "a"}))
    {'x': array([0, 1, 2]), 'name': 'a'}
    """
    sample = {name: plain(value) for name, value in sample.items()}
    schema = schema_of(sample)
    if why := why_unsupported(schema):
        raise SourceError(why)
    values = {name: to_bytes(field, sample[name]) for name, field in schema.items()}
    for name, field in schema.items():
        if field.kind in ("text", "bytes"):
            schema[name] = replace(field, shape=(len(values[name]),))
    header = json.dumps(fields_to_json(schema), separators=(",", ":")).encode()
    if len(header) > _MOST_HEADER_NBYTES:
        raise SourceError(
            f"{len(sample)} fields need a header of {len(header)} bytes; {_MOST_HEADER_NBYTES} are the most"
        )
    parts, end = [struct.pack("<I", len(header)), header], _PREFIX.size + len(header)
    for value in values.values():
        parts += [bytes(-end % _ALIGNMENT), value]
        end += -end % _ALIGNMENT + len(value)
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
    magic, crc, header_nbytes = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise SourceError(f"it begins with {magic!r}, and a packed sample with {MAGIC!r}")
    begin = _PREFIX.size + header_nbytes
    if begin > len(view) or header_nbytes > _MOST_HEADER_NBYTES:
        raise SourceError(f"a header of {header_nbytes} bytes does not fit: there are {len(view)} bytes in all")
    if zlib.crc32(view[8:]) != crc:
        raise SourceError("its CRC-32 does not match: it is truncated or corrupt")
    fields, end = _places(bytes(view[_PREFIX.size : begin]))
    if end != len(view):
        raise SourceError(f"it needs {end} bytes, and has {len(view)}")
    sample = {}
    for name, field, at, stop in fields:
        try:
            sample[name] = from_bytes(field, view[at:stop], field.shape)  # type: ignore[arg-type]  # none is None
        except ValueError as error:
            raise SourceError(f"its field {name!r} cannot be read: {error}") from error
    return sample


@lru_cache(maxsize=64)
def _places(header: bytes) -> tuple[list[tuple[str, Field, int, int]], int]:
    """Return where a sample's fields lie, and where it ends. Samples of one shape share one header, and this."""
    try:
        schema = fields_from_json(json.loads(header))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"its header cannot be read: {error}") from error
    found, end = [], _PREFIX.size + len(header)
    for name, field in schema.items():
        if None in field.shape or (field.kind == "number" and field.shape):
            raise SourceError(f"its field {name!r} has no size, or is a {field.words()} of the shape {field.shape}")
        at = end + -end % _ALIGNMENT
        end = at + math.prod(size or 0 for size in field.shape) * (np.dtype(field.dtype).itemsize if field.dtype else 1)
        found.append((name, field, at, end))
    return found, end
