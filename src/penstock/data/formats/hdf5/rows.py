"""Rows of an HDF5 dataset: read in place, unpacked here, or read by the HDF5 library."""

from __future__ import annotations

import itertools
import math
import zlib
from functools import partial
from typing import Any, Protocol

import numpy as np

from penstock.core.errors import RecordError
from penstock.data.chunks.chunk_cache import ChunkCache
from penstock.data.formats.hdf5.file import HDF5File
from penstock.data.formats.hdf5.layout import DatasetLayout
from penstock.data.sample_batch import as_slice

_MAX_RATIO = 1032
"""What deflate packs best: https://zlib.net/zlib_tech.html"""

_HARMLESS_NBYTES = 64 << 20
_BLOCK_NBYTES = 4096
"""Of rows in place that are read together, where they are small."""
_SHORT_NBYTES = 1 << 20
"""A whole dataset of small rows, of which all are read together."""


class Rows(Protocol):
    """Gives the rows of one dataset, in any thread."""

    def row(self, index: int) -> Any:
        """Return a row: an array, or a NumPy scalar.

        Raises:
            RecordError: it is broken.
        """

    def span(self, start: int, stop: int) -> np.ndarray:
        """Return several rows."""

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Return rows, a copy, in any order."""


def open_rows(layout: DatasetLayout, file: HDF5File, chunks: ChunkCache[np.ndarray], *, in_spans: bool = False) -> Rows:
    """Return what reads the rows of a dataset.

    Args:
        layout: where they lie.
        file: in which.
        chunks: those that were unpacked.
        in_spans: whether many rows are asked for at a time, and not single ones.
    """
    if layout.is_in_place and (in_spans or layout.row_nbytes >= _BLOCK_NBYTES // 4):
        return InPlaceRows(layout, file)
    return ChunkedRows(layout, file, chunks)


class InPlaceRows:
    """Rows that are ranges of bytes.

    They are read, not mapped: a page that a mapping lacks is fetched under the GIL, a file that was cut off in the
    meantime is a signal instead of an error, and who changes a sample would change the file's rows.
    """

    def __init__(self, layout: DatasetLayout, file: HDF5File) -> None:
        self._layout = layout
        self._file = file
        self._row_nbytes = layout.row_nbytes

    def row(self, index: int) -> Any:
        """Return a row."""
        found = np.empty(self._layout.shape, self._layout.dtype)
        self._fill(found, index, 1)
        return found if found.ndim else found[()]

    def span(self, start: int, stop: int) -> np.ndarray:
        """Return several rows."""
        found = np.empty((stop - start, *self._layout.shape), self._layout.dtype)
        rows = self._layout.rows_per_chunk if self._layout.access == "chunks" else max(1, self._layout.count)
        for at in _cuts(start, stop, rows):
            part = found[at - start : min(stop, (at // rows + 1) * rows) - start]
            self._fill(part, at, len(part))
        return found

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Return rows: those that follow each other by one read."""
        run = as_slice(indices)
        if run is not None:
            return self.span(run.start, run.stop)
        found = np.empty((len(indices), *self._layout.shape), self._layout.dtype)
        if self._layout.chunks is None and self._row_nbytes:
            self._file.read_rows(self._layout.offset, indices.tolist(), found, self._layout.name)
        else:
            for place, index in enumerate(indices.tolist()):
                self._fill(found[place : place + 1], index, 1)
        return found

    def _fill(self, part: np.ndarray, start: int, count: int) -> None:
        layout, file = self._layout, self._file
        key = f"{layout.name}[{start}]"
        if layout.chunks is None:
            file.read(layout.offset + start * self._row_nbytes, part, key)
            return
        number, skipped = divmod(start, layout.rows_per_chunk)
        chunk = layout.chunks.find(number)
        if chunk is None:
            part[...] = fill_rows(layout, part.shape)
            return
        if chunk[1] < (skipped + count) * self._row_nbytes:
            raise RecordError(file.path, chunk[0], key, f"its chunk has no more than {chunk[1]} bytes")
        file.read(chunk[0] + skipped * self._row_nbytes, part, key)


class ChunkedRows:
    """Rows of chunks that have to be unpacked, here or by the library, or of blocks of small rows; kept a while."""

    def __init__(self, layout: DatasetLayout, file: HDF5File, chunks: ChunkCache[np.ndarray]) -> None:
        self._layout = layout
        self._file = file
        self._chunks = chunks
        self._rows = layout.rows_per_chunk
        if layout.access == "contiguous":
            is_short = layout.count * layout.row_nbytes <= _SHORT_NBYTES
            self._rows = max(1, layout.count if is_short else _BLOCK_NBYTES // layout.row_nbytes)

    def row(self, index: int) -> Any:
        """Return a row: a copy, as a row must not keep its chunk alive."""
        number, at = divmod(index, self._rows)
        row = (self._unpack(number) if self._rows == 1 else self._get(number))[at]
        return row.copy() if isinstance(row, np.ndarray) else row

    def span(self, start: int, stop: int) -> np.ndarray:
        """Return several rows."""
        rows = self._rows
        parts = [
            self._get(at // rows)[at % rows : min(stop - at // rows * rows, rows)] for at in _cuts(start, stop, rows)
        ]
        return np.concatenate([np.empty((0, *self._layout.shape), self._layout.dtype), *parts])

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Return rows, chunk by chunk."""
        run = as_slice(indices)
        if run is not None:
            return self.span(run.start, run.stop)
        found = np.empty((len(indices), *self._layout.shape), self._layout.dtype)
        numbers = indices // self._rows
        for number in set(numbers.tolist()):
            places = np.flatnonzero(numbers == number)
            found[places] = self._get(number)[indices[places] - number * self._rows]
        return found

    def _get(self, number: int) -> np.ndarray:
        return self._chunks.get((self._file.path, self._layout.name, number), partial(self._unpack, number))

    def _unpack(self, number: int) -> np.ndarray:
        layout = self._layout
        start = number * self._rows
        stop = min(start + self._rows, layout.count)
        if layout.access == "library":
            return self._file.rows(layout.name, start, stop)
        if layout.access == "contiguous":
            block = np.empty((stop - start, *layout.shape), layout.dtype)
            self._file.read(layout.offset + start * layout.row_nbytes, block, f"{layout.name}[{start}]")
            return block
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
            return fill_rows(layout, layout.chunk)
        offset, nbytes, skipped = found
        key = f"{layout.name}, chunk {number}"
        data: Any = file.take(offset, nbytes, key)
        wanted = math.prod(layout.chunk) * layout.dtype.itemsize
        for turn, (filter_, size) in reversed(list(enumerate(layout.filters))):
            if not skipped >> turn & 1:
                data = inflate(data, wanted) if filter_ == "deflate" else unshuffle(data, size)
        if len(data) != wanted:
            raise RecordError(file.path, offset, key, f"unpacks to other than its {wanted} bytes, or not at all")
        return np.frombuffer(data, layout.dtype).reshape(layout.chunk)


def _cuts(start: int, stop: int, rows: int) -> list[int]:
    return [start, *range((start // rows + 1) * rows, stop, rows)] if start < stop else []


def fill_rows(layout: DatasetLayout, shape: tuple[int, ...]) -> np.ndarray:
    """Return rows that were never written."""
    one = np.frombuffer(layout.fill, layout.dtype)
    return np.broadcast_to(one[0], shape)


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
    return whole.data
