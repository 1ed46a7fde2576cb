"""What the pages of a Parquet column chunk unpack to, as their headers say: pyarrow takes memory as these say.

A page header is a struct of Thrift's compact protocol (parquet.thrift of the format):

    PageHeader            1 type | 2 bytes unpacked | 3 bytes as stored | 5, 7, 8 the header of its type
    data page (5)         1 values | 2 encoding
    dictionary page (7)   1 values
    data page, v2 (8)     1 values | 4 encoding

Each field begins with a byte: how far its number is from the one before, and its type; if the distance is 0, the number
follows. Integers are zigzag varints of 7 bits a byte.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import SourceError

_FIRST_NBYTES, _MOST_NBYTES = 512, 16 << 20
"""Of a header: what is read at first, and at most, as by Arrow; statistics make it long."""
_SPARE_NBYTES = 100
"""That Arrow reads beyond the end of a chunk of some writers."""
_DICTIONARY_PAGE = 2
_OF_DICTIONARY, _DELTA_BYTES = (2, 8), 7
"""Encodings whose values may be many times their page: numbers of dictionary entries, and ends of the value before."""
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 7, 8, 12
_DEEPEST = 16


@dataclass(slots=True)
class ChunkPages:
    """Sums over the pages of one column chunk."""

    values: int = 0
    """Nulls among them."""
    dictionary_values: int = 0
    """Of pages with numbers of dictionary entries."""
    delta_values: int = 0
    """Of pages whose values begin as the one before."""
    dictionary_nbytes: int = 0
    plain_nbytes: int = 0
    """Of pages that hold values as they are."""
    largest_nbytes: int = 0
    """Of a page."""


def read_pages(descriptor: int, start: int, end: int, values: int) -> ChunkPages:
    """Return the sums over the pages from an offset of a file on, as far as pyarrow reads them; only headers are read.

    Args:
        descriptor: of the file.
        start: where the first page begins.
        end: where the last one ends. Old writers say so without the header of the dictionary: `_SPARE_NBYTES`.
        values: of all pages; what follows when they have come is not read.

    Raises:
        SourceError: a header is damaged, or no header (the column is encrypted).
    """
    found = ChunkPages()
    end += _SPARE_NBYTES
    while start < end and found.values < values:
        fields, size = _header(descriptor, start, end)
        kind, unpacked, stored = (_integer(fields, number) for number in (1, 2, 3))
        inner: dict[int, Any] = next(
            (fields[number] for number in (5, 7, 8) if isinstance(fields.get(number), dict)), {}
        )
        held, encoding = _integer(inner, 1), _integer(inner, 4 if 8 in fields else 2)
        start += size + stored
        if min(kind, unpacked, stored, held, encoding) < 0 or start > end:
            raise SourceError(f"a page before byte {start} states what cannot be")
        found.largest_nbytes = max(found.largest_nbytes, unpacked)
        if kind == _DICTIONARY_PAGE:
            found.dictionary_nbytes += unpacked
            continue
        found.values += held
        if encoding in _OF_DICTIONARY:
            found.dictionary_values += held
        elif encoding == _DELTA_BYTES:
            found.delta_values += held
        else:
            found.plain_nbytes += unpacked
    return found


def _integer(fields: dict[int, Any], number: int) -> int:
    """Return a field; -1 if it is missing or something else."""
    found = fields.get(number)
    return found if isinstance(found, int) else -1


def _header(descriptor: int, start: int, end: int) -> tuple[dict[int, Any], int]:
    """Return the fields of a header, and its size."""
    nbytes = _FIRST_NBYTES
    while True:
        data = os.pread(descriptor, min(nbytes, end - start), start)
        try:
            return _Compact(data).struct()
        except IndexError:
            if len(data) < nbytes or nbytes >= _MOST_NBYTES:
                raise SourceError(f"no page begins at byte {start}") from None
            nbytes *= 32
        except ValueError as error:
            raise SourceError(f"no page begins at byte {start}: {error}") from None


class _Compact:
    """Reads Thrift's compact protocol; IndexError where the data end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def struct(self, depth: int = 0) -> tuple[dict[int, Any], int]:
        """Return the integers and structs of a struct by their numbers, and where it ends."""
        if depth > _DEEPEST:
            raise ValueError("it is nested too deep")
        fields: dict[int, Any] = {}
        number, data = 0, self._data
        while first := data[self._at]:
            self._at += 1
            number = number + (first >> 4) if first >> 4 else self._integer()
            fields[number] = self._value(first & 15, depth)
        self._at += 1
        return fields, self._at

    def _value(self, kind: int, depth: int) -> Any:
        if _BYTE < kind < _DOUBLE:
            return self._integer()
        if kind == _STRUCT:
            return self.struct(depth + 1)[0]
        if kind == _BINARY:
            self._skip(self._varint())
        elif kind in (_BYTE, _DOUBLE):
            self._skip(1 if kind == _BYTE else 8)
        elif kind not in (_TRUE, _FALSE):
            raise ValueError(f"a field has the type {kind}")
        return None

    def _skip(self, nbytes: int) -> None:
        self._at += nbytes
        if self._at > len(self._data):
            raise IndexError

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number is too long")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
