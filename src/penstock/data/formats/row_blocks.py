"""Collects rows to blocks that are appended to growing arrays: for the writers of HDF5 and Zarr.

A block is about 1 MiB of rows, and a chunk of the array. The array is made with the first block: fewer rows than a
chunk has make a smaller chunk. Ragged arrays are three arrays: all elements, where each begins, and its shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

_CHUNK_NBYTES = 1 << 20
_MAX_OBJECTS = 4096

Make = Callable[[tuple[int, ...], tuple[int, ...], Any], Any]
"""Makes an empty array, given the shape of a row, the shape of a chunk and the dtype."""

Append = Callable[[Any, np.ndarray], None]
"""Adds rows to the end of an array."""


class RowBlocks:
    """Collects rows of one shape and adds them to an array, a block at a time.

    >>> made = []
    >>> def append(array, block):
    ...     array.append(block.tolist())
    >>> rows = RowBlocks(lambda row, chunk, dtype: made, append, np.dtype("int64"), ())
    >>> rows.extend(np.arange(3))
    >>> rows.add(3)
    >>> rows.finish()
    >>> made
    [[0, 1, 2, 3]]
    """

    def __init__(self, make: Make, append: Append, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._make, self._append = make, append
        row_nbytes = math.prod(shape) * dtype.itemsize
        self._block = np.empty((max(1, _CHUNK_NBYTES // max(1, row_nbytes)), *shape), dtype)
        self._filled = 0
        self._array: Any = None

    def add(self, value: Any) -> None:
        """Add a row."""
        self._block[self._filled] = value
        self._filled += 1
        if self._filled == len(self._block):
            self._flush()

    def extend(self, values: np.ndarray) -> None:
        """Add many rows."""
        while len(values):
            part = values[: len(self._block) - self._filled]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            values = values[len(part) :]
            if self._filled == len(self._block):
                self._flush()

    def finish(self) -> None:
        """Add what is left; an array without rows is made too."""
        if self._filled or self._array is None:
            self._flush()

    def _flush(self) -> None:
        if self._array is None:
            row = self._block.shape[1:]
            chunk = (max(1, self._filled), *(max(1, size) for size in row))
            self._array = self._make(row, chunk, self._block.dtype)
        self._append(self._array, self._block[: self._filled])
        self._filled = 0


class RaggedBlocks:
    """Collects arrays whose shapes differ.

    Args:
        make: makes an array, given its name (values, offsets or shapes), and the rest as `Make`.
        append: adds a block to an array.
        dtype: of the elements.
        dimensions: of each array.
    """

    def __init__(self, make: Callable[..., Any], append: Append, dtype: np.dtype[Any], dimensions: int) -> None:
        whole = np.dtype(np.int64)
        self._values = RowBlocks(partial(make, "values"), append, dtype, ())
        self._offsets = RowBlocks(partial(make, "offsets"), append, whole, ())
        self._shapes = RowBlocks(partial(make, "shapes"), append, whole, (dimensions,))
        self._total = 0

    def add(self, value: np.ndarray | bytes) -> None:
        """Add an array; bytes are one of uint8."""
        array = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
        self._offsets.add(self._total)
        self._shapes.add(array.shape)
        self._values.extend(array.reshape(-1))
        self._total += array.size

    def finish(self) -> None:
        """Add what is left."""
        for rows in (self._values, self._offsets, self._shapes):
            rows.finish()


class ObjectBlocks:
    """Collects text or bytes; `encode` makes what the array holds of a value, and `dtype` is as the format names it."""

    def __init__(self, make: Make, append: Append, dtype: Any, encode: Callable[[Any], Any]) -> None:
        self._make, self._append, self._dtype, self._encode = make, append, dtype, encode
        self._array: Any = None
        self._held: list[Any] = []
        self._held_nbytes = 0

    def add(self, value: str | bytes) -> None:
        """Add a value."""
        self._held.append(self._encode(value))
        self._held_nbytes += len(self._held[-1])
        if self._held_nbytes >= _CHUNK_NBYTES or len(self._held) == _MAX_OBJECTS:
            self.finish()

    def finish(self) -> None:
        """Add what is left; an array without rows is made too."""
        if self._array is None:
            self._array = self._make((), (max(1, len(self._held)),), self._dtype)
        block = np.empty(len(self._held), object)
        for number, value in enumerate(self._held):  # all at once, arrays of one length would become one
            block[number] = value
        self._append(self._array, block)
        self._held.clear()
        self._held_nbytes = 0
