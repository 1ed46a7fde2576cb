"""What the pages of a Parquet file say to unpack to, read from their headers before pyarrow believes them.

Some hundred bytes can say that they are billions of values, all alike. A column chunk is a row of pages, each a header
and so many packed bytes; the footer says where it begins. Field numbers of the structs that are looked at:

    FileMetaData 4 row_groups   RowGroup 1 columns   ColumnChunk 3 meta_data
    ColumnMetaData 1 type 3 path_in_schema 7 total_compressed_size 9 data_page_offset 11 dictionary_page_offset
    PageHeader 2 uncompressed_page_size 3 compressed_page_size 5 data page 7 dictionary page 8 data page V2
    each of these three: 1 num_values

Source: apache/parquet-format, `parquet.thrift`.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Collection
from dataclasses import dataclass

from penstock.core.errors import SourceError
from penstock.feed.sources.thrift import Struct, ThriftError, struct_of

_HEADER_NBYTES, _LARGE_HEADER_NBYTES = 4 << 10, 1 << 20
_COUNTED = (5, 7, 8)
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}
"""Bytes of a value by its physical type: boolean, int32, int64, int96, float, double. Others bring their own."""

_FREE_NBYTES = 64 << 20
_TIMES = 1000
"""A page may unpack to so many times its bytes, or to `_FREE_NBYTES`."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Where a column of a row group lies."""

    column: str
    kind: int
    """Its physical type."""
    offset: int
    nbytes: int


def chunks_of(footer: bytes | memoryview, where: str) -> list[list[Chunk]]:
    """Return the chunks of each row group, from a serialised FileMetaData.

    Raises:
        SourceError: it is damaged.
    """
    try:
        metadata, _ = struct_of(footer)
        return [[_chunk(column[3]) for column in group.get(1, [])] for group in metadata.get(4, [])]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise SourceError(f"{where}: its footer is damaged: {type(error).__name__}: {error}") from error


def _chunk(metadata: Struct) -> Chunk:
    first = min(metadata[9], metadata.get(11) or metadata[9])
    column = ".".join(part.decode() for part in metadata[3])
    return Chunk(column, operator.index(metadata[1]), operator.index(first), operator.index(metadata[7]))


def check_pages(path: str, chunks: list[Chunk], columns: Collection[str], most_nbytes: int) -> None:
    """Look at the page headers of some columns of a row group.

    Args:
        path: of the local file.
        chunks: of the row group.
        columns: the dotted paths of those that are to be unpacked, or of what holds them.
        most_nbytes: what all their pages together may unpack to.

    Raises:
        SourceError: they say to unpack to more, or to more than their bytes can reasonably hold, or are damaged.
    """
    whole = 0
    with open(path, "rb", buffering=0) as file:
        descriptor, end = file.fileno(), os.fstat(file.fileno()).st_size
        for chunk in chunks:
            if any(chunk.column == name or chunk.column.startswith(f"{name}.") for name in columns):
                whole += _unpacked(path, descriptor, end, chunk)
    if whole > most_nbytes:
        raise SourceError(
            f"{path}: pages of a row group unpack to {whole} bytes; write smaller row groups (row_group_size=), or "
            f"raise max_group_nbytes, which is {most_nbytes}"
        )


def _unpacked(path: str, descriptor: int, end: int, chunk: Chunk) -> int:
    """Return the bytes that a chunk's pages say to unpack to."""
    at, stop = chunk.offset, chunk.offset + chunk.nbytes
    if not 0 <= at <= stop <= end:
        raise SourceError(f"{path}: column {chunk.column!r} lies at bytes {at} to {stop}, and the file has {end}")
    whole = 0
    while at < stop:
        try:
            header, length = _header(descriptor, at, stop)
            values = max(operator.index(header[kind][1]) for kind in _COUNTED if kind in header)
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
        if nbytes > max(_FREE_NBYTES, _TIMES * packed):
            raise SourceError(
                f"{path}: a page of {packed} bytes of column {chunk.column!r}, at byte {at}, says to unpack to "
                f"{nbytes}; more than {_TIMES} times as many are not believed"
            )
        whole += nbytes
        at += length + packed
    return whole


def _header(descriptor: int, at: int, stop: int) -> tuple[Struct, int]:
    try:
        return struct_of(os.pread(descriptor, min(_HEADER_NBYTES, stop - at), at))
    except ThriftError:  # a page's statistics may be long texts
        return struct_of(os.pread(descriptor, min(_LARGE_HEADER_NBYTES, stop - at), at))
