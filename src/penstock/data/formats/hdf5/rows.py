"""Rows of an HDF5 dataset: in the file as they are, unpacked here, or read by the HDF5 library."""

from __future__ import annotations

import itertools
import math
import zlib
from typing import Any

import numpy as np

from penstock.core.errors import RecordError
from penstock.data.chunks.chunk_cache import ChunkCache
from penstock.data.formats.chunked_rows import ChunkedRows
from penstock.data.formats.hdf5.file import HDF5File
from penstock.data.formats.hdf5.layout import DatasetLayout

_MAX_RATIO = 1032
"""What deflate packs best: https://zlib.net/zlib_tech.html"""

_HARMLESS_NBYTES = 64 << 20


def open_rows(layout: DatasetLayout, file: HDF5File, cache: ChunkCache[np.ndarray]) -> ChunkedRows:
    """Return what reads the rows of a dataset: contiguous ones are one chunk, and what lies in place is not cached."""
    empty = np.empty((0, *layout.shape), layout.dtype)
    chunks = _Chunks(layout, file)
    if layout.access == "contiguous":
        return ChunkedRows(empty, max(1, layout.count), chunks.whole)
    rows = layout.rows_per_chunk
    if layout.access == "library":
        return ChunkedRows(empty, rows, chunks.by_library, cache if rows > 1 else None, (file.path, layout.name))
    return ChunkedRows(empty, rows, chunks.unpack, None if layout.is_in_place else cache, (file.path, layout.name))


class _Chunks:
    def __init__(self, layout: DatasetLayout, file: HDF5File) -> None:
        self._layout, self._file = layout, file

    def whole(self, number: int) -> np.ndarray:
        layout = self._layout
        count = layout.count * math.prod(layout.shape)
        return self._file.view(layout.offset, count, layout.dtype, layout.name).reshape(-1, *layout.shape)

    def by_library(self, number: int) -> np.ndarray:
        rows = self._layout.rows_per_chunk
        return self._file.rows(self._layout.name, number * rows, min((number + 1) * rows, self._layout.count))

    def unpack(self, number: int) -> np.ndarray:
        """Return the rows of a row of the grid of chunks."""
        layout = self._layout
        start = number * layout.rows_per_chunk
        stop = min(start + layout.rows_per_chunk, layout.count)
        if layout.chunk[1:] == layout.shape:
            return self._chunk(number)[: stop - start]
        whole = np.empty((stop - start, *layout.shape), layout.dtype)
        width = math.prod(layout.grid[1:])
        for turn, place in enumerate(itertools.product(*map(range, layout.grid[1:]))):
            corner = [at * size for at, size in zip(place, layout.chunk[1:], strict=True)]
            there = tuple(slice(at, at + size) for at, size in zip(corner, layout.chunk[1:], strict=True))
            part = whole[(slice(None), *there)]
            part[...] = self._chunk(number * width + turn)[tuple(map(slice, part.shape))]
        return whole

    def _chunk(self, number: int) -> np.ndarray:
        layout, file = self._layout, self._file
        found = layout.chunks.find(number) if layout.chunks is not None else None
        if found is None:
            return np.broadcast_to(np.frombuffer(layout.fill, layout.dtype)[0], layout.chunk)
        offset, nbytes, skipped = found
        key = f"{layout.name}, chunk {number}"
        data: Any = file.view(offset, nbytes, np.dtype(np.uint8), key)
        wanted = math.prod(layout.chunk) * layout.dtype.itemsize
        for turn, (filter_, size) in reversed(list(enumerate(layout.filters))):
            if not skipped >> turn & 1:
                data = inflate(data, wanted) if filter_ == "deflate" else unshuffle(data, size)
        if layout.filters and isinstance(data, np.ndarray) and not data.flags.writeable:
            data = data.copy()  # it is kept, and the file may be cut off
        if len(data) != wanted:
            raise RecordError(file.path, offset, key, f"unpacks to other than its {wanted} bytes, or not at all")
        return np.frombuffer(data, layout.dtype).reshape(layout.chunk)


def inflate(data: Any, max_nbytes: int) -> bytes:
    """Return what deflate packed; nothing of what is broken, and a byte more than `max_nbytes` of what is longer.

    >>> inflate(zlib.compress(bytes(100)), 100) == bytes(100), len(inflate(zlib.compress(bytes(1000)), 100))
    (True, 101)
    """
    try:
        if len(data) * _MAX_RATIO <= _HARMLESS_NBYTES:  # an eighth faster than in pieces that are put together
            return zlib.decompress(data, bufsize=max(1, max_nbytes))[: max_nbytes + 1]
        inflating = zlib.decompressobj()
        found = inflating.decompress(data, max_nbytes + 1)
    except zlib.error:
        return b""
    return found if inflating.eof or len(found) > max_nbytes else b""


def unshuffle(data: Any, size: int) -> Any:
    """Return elements of `size` bytes of which all first bytes came first, then all second bytes ...

    >>> bytes(unshuffle(b"acbd", 2))
    b'abcd'
    """
    count = len(data) // size
    if size == 1 or count <= 1:
        return data
    planes = np.frombuffer(data, np.uint8, count * size).reshape(size, count)
    whole = np.empty(len(data), np.uint8)
    whole[: count * size].reshape(count, size)[...] = planes.T
    whole[count * size :] = np.frombuffer(data, np.uint8, offset=count * size)
    return whole
