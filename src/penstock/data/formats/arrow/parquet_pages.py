"""How much the pages of a Parquet file unpack to, read from their headers before pyarrow allocates it.

A page of a hundred bytes can state billions of equal values, and pyarrow has no limit for what it unpacks; nor does it
give access to page headers. So they are read here. A column chunk is a row of pages, each a header and its packed
bytes; the footer states where it begins. Of these structs, these fields are used:

    FileMetaData 4 row_groups   RowGroup 1 columns   ColumnChunk 3 meta_data 8 crypto_metadata, if it is encrypted
    ColumnMetaData 1 type 3 path_in_schema 7 total_compressed_size 9 data_page_offset 11 dictionary_page_offset
    PageHeader 2 uncompressed_page_size 3 compressed_page_size 5 data page 7 dictionary page 8 data page V2
    each of these three: 1 num_values

They are in Thrift's compact protocol. A struct is read as {field number: value}: integers are int, binaries bytes,
lists lists, structs dicts. Each value costs at least a byte of input, so that the result is not much larger than it.

Sources: apache/parquet-format, `parquet.thrift`; Apache Thrift, "Thrift Compact protocol encoding".
"""

from __future__ import annotations

import operator
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import SourceError

Struct = dict[int, Any]

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_MOST_DEPTH = 16

_HEADER_NBYTES, _LARGE_HEADER_NBYTES = 4 << 10, 1 << 20
_COUNTED = (5, 7, 8)
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}
"""Bytes of a value by its physical type: boolean, int32, int64, int96, float, double. Others bring their own."""

_ALWAYS_ALLOWED_NBYTES = 64 << 20
_MAX_RATIO = 1000
"""A page may unpack to `_MAX_RATIO` times its bytes, or to `_ALWAYS_ALLOWED_NBYTES`."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Where a column of a row group lies."""

    column: str
    kind: int
    """Its physical type."""
    offset: int
    nbytes: int
    is_encrypted: bool


def column_chunks(footer: bytes | memoryview, where: str) -> list[list[Chunk]]:
    """Return the chunks of each row group, from a serialised FileMetaData.

    Raises:
        SourceError: it is damaged.
    """
    try:
        metadata, _ = read_struct(footer)
        return [[_chunk(column) for column in group.get(1, [])] for group in metadata.get(4, [])]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise SourceError(f"{where}: its footer is damaged: {type(error).__name__}: {error}") from error


def _chunk(chunk: Struct) -> Chunk:
    metadata = chunk[3]
    first = min(metadata[9], metadata.get(11) or metadata[9])
    column = ".".join(part.decode() for part in metadata[3])
    return Chunk(column, operator.index(metadata[1]), operator.index(first), operator.index(metadata[7]), 8 in chunk)


def check_pages(path: str, chunks: list[Chunk], columns: Collection[str], most_nbytes: int) -> None:
    """Check the page headers of some columns of a row group.

    Args:
        path: of the local file.
        chunks: of the row group.
        columns: the dotted paths of those that are to be unpacked, or of what holds them.
        most_nbytes: what all their pages together may unpack to.

    Raises:
        SourceError: they unpack to more, or to more than `_MAX_RATIO` times their bytes, or are damaged.
    """
    whole = 0
    with open(path, "rb", buffering=0) as file:
        descriptor, end = file.fileno(), os.fstat(file.fileno()).st_size
        for chunk in chunks:
            if any(chunk.column == name or chunk.column.startswith(f"{name}.") for name in columns):
                if chunk.is_encrypted:
                    raise SourceError(
                        f"{path}: column {chunk.column!r} is encrypted; leave it out with fields=, or write the file "
                        "without encryption"
                    )
                whole += _unpacked_nbytes(path, descriptor, end, chunk)
    if whole > most_nbytes:
        raise SourceError(
            f"{path}: pages of a row group unpack to {whole} bytes; write smaller row groups (row_group_size=), or "
            f"raise max_group_nbytes, which is {most_nbytes}"
        )


def _unpacked_nbytes(path: str, descriptor: int, end: int, chunk: Chunk) -> int:
    """Return how many bytes a chunk's pages unpack to."""
    at, stop = chunk.offset, chunk.offset + chunk.nbytes
    if not 0 <= at <= stop <= end:
        raise SourceError(f"{path}: column {chunk.column!r} lies at bytes {at} to {stop}, and the file has {end}")
    whole = 0
    while at < stop:
        try:
            header, length = _header(descriptor, at, stop)
            values = max((operator.index(header[kind][1]) for kind in _COUNTED if kind in header), default=0)
            unpacked, packed = operator.index(header[2]), operator.index(header[3])
        except (LookupError, TypeError, ValueError) as error:
            raise SourceError(
                f"{path}: the page of column {chunk.column!r} at byte {at} is damaged: {error}"
            ) from error
        if min(values, unpacked, packed) < 0 or at + length + packed > stop:
            raise SourceError(
                f"{path}: the page of column {chunk.column!r} at byte {at} has {packed} bytes, {unpacked} unpacked, "
                f"and {values} values"
            )
        nbytes = max(unpacked, values * _WIDTHS.get(chunk.kind, 1))
        if nbytes > max(_ALWAYS_ALLOWED_NBYTES, _MAX_RATIO * packed):
            raise SourceError(
                f"{path}: a page of {packed} bytes of column {chunk.column!r}, at byte {at}, unpacks to {nbytes} "
                f"bytes; at most {_MAX_RATIO} times as many are read"
            )
        whole += nbytes
        at += length + packed
    return whole


def _header(descriptor: int, at: int, stop: int) -> tuple[Struct, int]:
    try:
        return read_struct(os.pread(descriptor, min(_HEADER_NBYTES, stop - at), at))
    except ThriftError:  # a page's statistics may be long texts
        return read_struct(os.pread(descriptor, min(_LARGE_HEADER_NBYTES, stop - at), at))


class ThriftError(ValueError):
    """Bytes that are no struct of Thrift's compact protocol."""


def read_struct(data: bytes | memoryview) -> tuple[Struct, int]:
    """Return the struct that begins `data`, and how many bytes it takes.

    Raises:
        ThriftError: there is none, or not all of it.

    >>> read_struct(bytes([0x15, 0x02, 0x18, 0x02]) + b"ab" + bytes([0x00]))
    ({1: 1, 2: b'ab'}, 7)
    """
    reader = _ThriftReader(data)
    try:
        found = reader.struct(0)
    except IndexError:
        raise ThriftError(f"the struct does not end within its {len(data)} bytes") from None
    return found, reader.at


class _ThriftReader:
    def __init__(self, data: bytes | memoryview) -> None:
        self.at = 0
        self._data = data

    def struct(self, depth: int) -> Struct:
        if depth > _MOST_DEPTH:
            raise ThriftError(f"structs lie in each other more than {_MOST_DEPTH} deep")
        found: Struct = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._zigzag()
            kind = head & 15
            found[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_I16, _I32, _I64):
            return self._zigzag()
        if kind == _BINARY:
            return self._take(self._varint())
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_LIST, _SET):
            return self._list(depth)
        if kind in (_BYTE, _TRUE, _FALSE):
            return self._byte()
        if kind == _DOUBLE:
            return self._take(8)
        raise ThriftError(f"a field is of type {kind}")

    def _list(self, depth: int) -> list[Any]:
        head = self._byte()
        count = self._varint() if head >> 4 == 15 else head >> 4
        if count > len(self._data) - self.at:
            raise ThriftError(f"a list has {count} elements, and fewer bytes follow")
        return [self._value(head & 15, depth) for _ in range(count)]

    def _byte(self) -> int:
        byte = self._data[self.at]
        self.at += 1
        return byte

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise ThriftError(f"{count} bytes are needed, and {len(self._data) - self.at} follow")
        self.at += count
        return bytes(self._data[self.at - count : self.at])

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ThriftError("a number of more than ten bytes")

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
