"""Rows of an HDF5 dataset: in the file as they are, unpacked here, or read by the HDF5 library."""

from __future__ import annotations

import itertools
import math
import zlib
from typing import Any

import numpy as np

from penstock.core.errors import RecordError
from penstock.data.chunks.chunk_cache import ChunkCache
from penstock.data.formats.chunked_rows import ChunkedRows, Wanted
from penstock.data.formats.hdf5.file import HDF5File
from penstock.data.formats.hdf5.layout import DatasetLayout

_MAX_RATIO = 1032
"""What deflate packs best: https://zlib.net/zlib_tech.html"""

_HARMLESS_NBYTES = 64 << 20


def open_rows(layout: DatasetLayout, file: HDF5File, cache: ChunkCache[np.ndarray]) -> ChunkedRows:
    """Return what reads the rows of a dataset; what lies in the file as it is needs no cache."""
    chunks = _Chunks(layout, file)
    empty, key = np.empty((0, *layout.shape), layout.dtype), (file.path, layout.name)
    if layout.is_in_place:
        return _InPlaceRows(layout, file, empty, chunks)
    rows = layout.rows_per_chunk
    if layout.access == "library":
        return ChunkedRows(empty, rows, chunks.by_library, cache if rows > 1 else None, key)
    return ChunkedRows(empty, rows, chunks.unpack, cache, key)


class _InPlaceRows(ChunkedRows):
    """Rows that are ranges of bytes: those of a batch are gathered at once, from whatever chunks."""

    def __init__(self, layout: DatasetLayout, file: HDF5File, empty: np.ndarray, chunks: _Chunks) -> None:
        is_whole = layout.access == "contiguous"
        rows = max(1, layout.count) if is_whole else layout.rows_per_chunk
        super().__init__(empty, rows, chunks.whole if is_whole else chunks.unpack)
        self._layout, self._file = layout, file
        self._row = np.dtype((np.void, layout.row_nbytes))

    def take(self, wanted: Wanted) -> np.ndarray:
        layout = self._layout
        if isinstance(wanted, slice):
            return self._span(wanted.start, wanted.stop)
        offsets = self._offsets(wanted)
        if offsets is None:
            return super().take(wanted)
        data = self._file.mapped()
        windows: np.ndarray = np.ndarray((len(data) - layout.row_nbytes + 1,), self._row, data, 0, (1,))
        found: np.ndarray = windows[offsets].view(layout.dtype)
        return found.reshape(-1, *layout.shape)

    def _offsets(self, wanted: np.ndarray) -> np.ndarray | None:
        """Return where rows begin in the file; None if one was never written, or is not all there."""
        layout, chunks = self._layout, self._layout.chunks
        if chunks is None:
            return layout.offset + wanted * layout.row_nbytes
        if not len(chunks.numbers):
            return None
        numbers, rows = np.divmod(wanted, layout.rows_per_chunk)
        at = np.searchsorted(chunks.numbers, numbers).clip(max=len(chunks.numbers) - 1)
        ends = chunks.offsets[at] + chunks.sizes[at]
        is_there = (chunks.numbers[at] == numbers) & (ends <= self._file.nbytes)
        is_there &= chunks.sizes[at] == layout.rows_per_chunk * layout.row_nbytes
        return chunks.offsets[at] + rows * layout.row_nbytes if is_there.all() else None


class _Chunks:
    def __init__(self, layout: DatasetLayout, file: HDF5File) -> None:
        self._layout, self._file = layout, file
        self._whole: np.ndarray | None = None

    def whole(self, number: int) -> np.ndarray:
        layout = self._layout
        self._file.mapped()  # looks whether all is still there
        if self._whole is None:
            found = self._file.view(layout.offset, layout.count * math.prod(layout.shape), layout.dtype, layout.name)
            self._whole = found.reshape(-1, *layout.shape)
        return self._whole

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
