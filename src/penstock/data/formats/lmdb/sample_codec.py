"""One sample as bytes, and back: what an LMDB value holds.

    offset 0    4 bytes   "PSK" and a byte 1: magic, version
           4    uint32    CRC-32 of everything behind it
           8    uint32    bytes of the header
          12    uint32    fields
          16    header    for each field: kind (uint8), dtype (uint8, by its place in DTYPES), dimensions (uint16),
                          bytes of its name (uint32), bytes of its value (uint64), sizes (uint64 each), name (UTF-8)
                values    in the fields' order; each begins at a multiple of 16

Integers are little-endian. A value is an array's or a number's bytes (C order, little-endian), text in UTF-8, or bytes.
Nothing of it is ever executed, and every size is checked against the bytes that are there before it is used.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.schema import DTYPES, Sample, Schema, plain

MAGIC = b"PSK\x01"

_KINDS = ("array", "number", "text", "bytes")
_PREFIX = struct.Struct("<4sIII")
_FIELD = struct.Struct("<BBHIQ")
_ALIGNMENT = 16
_MOST_DIMENSIONS = 32
_MOST_HEADER_NBYTES = 1 << 20
_MOST_NBYTES = 1 << 48
"""Of an array without its empty dimensions: NumPy multiplies them too."""


def why_unsupported(schema: Schema) -> str:
    """Return why samples of this schema would not come back as they were; "" if they would.

    >>> from penstock.data.schema import Field
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


def pack(sample: Sample) -> bytes:
    """Return a sample as bytes.

    Raises:
        SourceError: a field holds something else than numbers, text or bytes.

    >>> unpack(pack({"x": np.arange(3), "name": "a"}))
    {'x': array([0, 1, 2]), 'name': 'a'}
    """
    head, values = [], []
    for name, value in sample.items():
        kind, dtype, shape, raw = _raw(name, plain(value))
        label = name.encode()
        head.append(_FIELD.pack(_KINDS.index(kind), dtype, len(shape), len(label), len(raw)))
        head.append(struct.pack(f"<{len(shape)}Q", *shape))
        head.append(label)
        values.append(raw)
    header = b"".join(head)
    if len(header) > _MOST_HEADER_NBYTES:
        raise SourceError(
            f"{len(sample)} fields need a header of {len(header)} bytes; {_MOST_HEADER_NBYTES} are the most"
        )
    parts = [struct.pack("<II", len(header), len(sample)), header]
    at = _PREFIX.size + len(header)
    for raw in values:
        parts += [b"\0" * (-at % _ALIGNMENT), raw]
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
    magic, crc, header_nbytes, count = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise SourceError(f"it begins with {magic!r}, and a packed sample with {MAGIC!r}")
    if header_nbytes > min(len(view) - _PREFIX.size, _MOST_HEADER_NBYTES):
        raise SourceError(f"a header of {header_nbytes} bytes does not fit: there are {len(view)} bytes in all")
    if zlib.crc32(view[8:]) != crc:
        raise SourceError("its CRC-32 does not match: it is truncated or corrupt")
    places, end = _layout(bytes(view[_PREFIX.size : _PREFIX.size + header_nbytes]), count)
    if end != len(view):
        raise SourceError(f"it needs {end} bytes, and has {len(view)}")
    return {place.name: place.value(view) for place in places}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a field lies in a packed sample, and what it is."""

    name: str
    kind: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    at: int
    nbytes: int

    def value(self, view: memoryview) -> Any:
        if self.kind == "bytes":
            return bytes(view[self.at : self.at + self.nbytes])
        if self.kind == "text":
            try:
                return str(view[self.at : self.at + self.nbytes], "utf-8")
            except UnicodeDecodeError as error:
                raise SourceError(f"field {self.name!r} is no UTF-8: {error}") from error
        if not self.nbytes:
            return np.empty(self.shape, self.dtype)
        array = np.ndarray(self.shape, self.dtype, view, self.at)
        if self.dtype.kind == "b" and array.view(np.uint8).max() > 1:
            raise SourceError(f"field {self.name!r} is bool, and holds bytes that are neither 0 nor 1")
        return array if self.kind == "array" else array[()]


def _raw(name: str, value: Any) -> tuple[str, int, tuple[int, ...], bytes]:
    """Return a value's kind, the number of its dtype, its shape and its bytes."""
    if isinstance(value, bytes):
        return "bytes", 0, (), value
    if isinstance(value, str):
        try:
            return "text", 0, (), value.encode()
        except UnicodeEncodeError as error:
            raise SourceError(f"field {name!r} is no valid text: {error}") from error
    dtype = value.dtype.newbyteorder("=").name
    if dtype not in DTYPES or value.ndim > _MOST_DIMENSIONS:
        raise SourceError(f"field {name!r} is {dtype} of {value.ndim} dimensions, which cannot be packed")
    kind = "array" if isinstance(value, np.ndarray) else "number"
    return kind, DTYPES.index(dtype), value.shape, value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()


@lru_cache(maxsize=64)
def _layout(header: bytes, count: int) -> tuple[tuple[_Place, ...], int]:
    """Return where a sample's fields lie, and where it ends. Samples of one shape share one header, and this."""
    places: dict[str, _Place] = {}
    at, end = 0, _PREFIX.size + len(header)
    for _ in range(count):
        if at + _FIELD.size > len(header):
            raise SourceError(f"its header of {len(header)} bytes ends before its {count} fields do")
        kind, dtype, dimensions, name_nbytes, nbytes = _FIELD.unpack_from(header, at)
        at += _FIELD.size
        if kind >= len(_KINDS) or dtype >= len(DTYPES) or dimensions > _MOST_DIMENSIONS:
            raise SourceError(f"a field of kind {kind}, dtype {dtype} and {dimensions} dimensions is unknown")
        if at + 8 * dimensions + name_nbytes > len(header):
            raise SourceError(f"its header of {len(header)} bytes ends before its {count} fields do")
        shape = struct.unpack_from(f"<{dimensions}Q", header, at)
        at += 8 * dimensions
        name = _name(header[at : at + name_nbytes], places)
        at += name_nbytes
        end += -end % _ALIGNMENT
        places[name] = _Place(name, _KINDS[kind], np.dtype(DTYPES[dtype]).newbyteorder("<"), shape, end, nbytes)
        _check(places[name])
        end += nbytes
    if at != len(header):
        raise SourceError(f"its {count} fields end at byte {at} of a header of {len(header)} bytes")
    return tuple(places.values()), end


def _name(raw: bytes, taken: dict[str, _Place]) -> str:
    try:
        name = raw.decode()
    except UnicodeDecodeError as error:
        raise SourceError(f"a field's name is no UTF-8: {error}") from error
    if name in taken:
        raise SourceError(f"it has two fields named {name!r}")
    return name


def _check(place: _Place) -> None:
    """Raise SourceError unless a field's shape needs exactly its bytes."""
    is_numbers = place.kind in ("array", "number")
    needed = math.prod(place.shape) * place.dtype.itemsize if is_numbers else place.nbytes
    is_bounded = math.prod(size or 1 for size in place.shape) * place.dtype.itemsize <= _MOST_NBYTES
    if needed != place.nbytes or not is_bounded or (place.shape and place.kind != "array"):
        raise SourceError(
            f"field {place.name!r} is {place.kind} of {place.dtype.name}{list(place.shape)}, and has {place.nbytes} "
            "bytes"
        )
