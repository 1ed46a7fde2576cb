"""Rows of an HDF5 dataset: in the file as they are, unpacked here, or read by the HDF5 library."""

from __future__ import annotations

import itertools
import math
import zlib
from functools import partial
from typing import Any

import numpy as np

from penstock.core.errors import RecordError
from penstock.data.formats.chunked_rows import ChunkedRows, Wanted
from penstock.data.formats.hdf5.file import MAX_RATIO, HDF5File
from penstock.data.formats.hdf5.layout import DatasetLayout
from penstock.data.rows import ChunkCache

_HARMLESS_NBYTES = 64 << 20


def open_rows(layout: DatasetLayout, file: HDF5File, cache: ChunkCache[Any]) -> ChunkedRows:
    """Return what reads the rows of a dataset; what lies in the file as it is needs no cache."""
    if layout.is_in_place:
        return _InPlaceRows(layout, file)
    empty, rows, key = np.empty((0, *layout.shape), layout.dtype), layout.chunk[0], (file.path, layout.name)
    if not layout.is_stored:
        return ChunkedRows(empty, rows, partial(_read_by_library, layout, file), cache if rows > 1 else None, key)
    return ChunkedRows(empty, rows, partial(_unpack, layout, file), cache, key, is_safe=True)


class _InPlaceRows(ChunkedRows):
    """Rows that are ranges of bytes: those of a batch are gathered at once, from whatever chunks."""

    def __init__(self, layout: DatasetLayout, file: HDF5File) -> None:
        empty = np.empty((0, *layout.shape), layout.dtype)
        super().__init__(empty, layout.chunk[0], partial(_unpack, layout, file), is_safe=True)
        self._layout, self._file = layout, file
        self._row = np.dtype((np.void, layout.row_nbytes))
        _, offsets, sizes, _ = layout.chunks
        is_whole = len(offsets) == layout.grid[0] and (sizes == layout.chunk[0] * layout.row_nbytes).all()
        self._offsets = offsets if is_whole and (offsets + sizes <= file.nbytes).all() else None
        """Where each chunk begins, if all are there."""

    def take(self, wanted: Wanted) -> np.ndarray:
        layout, offsets, rows = self._layout, self._offsets, self._rows
        if offsets is None:
            return super().take(wanted)
        if isinstance(wanted, slice):
            start, stop, number = wanted.start, wanted.stop, wanted.start // rows
            if not start < stop <= (number + 1) * rows:
                return super().take(wanted)
            at = int(offsets[number]) + (start - number * rows) * self._row.itemsize
            span: np.ndarray = np.empty((stop - start, *layout.shape), layout.dtype)
            self._file.read_into(span, at)
            return span
        numbers, inside = (0, wanted) if len(offsets) == 1 else np.divmod(wanted, rows)
        data = self._file.mapped()
        windows: np.ndarray = np.ndarray((len(data) - self._row.itemsize + 1,), self._row, data, 0, (1,))
        found: np.ndarray = windows[offsets[numbers] + inside * self._row.itemsize].view(layout.dtype)
        return found.reshape(-1, *layout.shape)


def _read_by_library(layout: DatasetLayout, file: HDF5File, number: int) -> np.ndarray:
    start = number * layout.chunk[0]
    return file.rows(layout.name, start, min(start + layout.chunk[0], layout.count), layout.max_nbytes)


def _unpack(layout: DatasetLayout, file: HDF5File, number: int) -> np.ndarray:
    """Return the rows of a row of the grid of chunks."""
    start = number * layout.chunk[0]
    count = min(layout.chunk[0], layout.count - start)
    if layout.chunk[1:] == layout.shape:
        return _unpack_chunk(layout, file, number)[:count]
    whole = np.empty((count, *layout.shape), layout.dtype)
    width = math.prod(layout.grid[1:])
    for turn, place in enumerate(itertools.product(*map(range, layout.grid[1:]))):
        corners = zip(place, layout.chunk[1:], strict=True)
        part = whole[(slice(None), *(slice(at * size, (at + 1) * size) for at, size in corners))]
        part[...] = _unpack_chunk(layout, file, number * width + turn)[tuple(map(slice, part.shape))]
    return whole


def _unpack_chunk(layout: DatasetLayout, file: HDF5File, number: int) -> np.ndarray:
    at = int(np.searchsorted(layout.chunks[0], number))
    if at == layout.chunks.shape[1] or layout.chunks[0, at] != number:
        return np.broadcast_to(layout.fill, layout.chunk)
    offset, nbytes, skipped = layout.chunks[1:, at].tolist()
    key = f"{layout.name}, chunk {number}"
    data: Any = file.view(offset, nbytes, key)
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
        if len(data) * MAX_RATIO <= _HARMLESS_NBYTES:  # an eighth faster than in pieces that are put together
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
