"""Rows of arrays that are read chunk by chunk, and the ragged arrays that are made of them: for HDF5 and Zarr."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.core.errors import RecordError, SourceError
from penstock.data.rows import ChunkCache
from penstock.data.schema import Field

Wanted = slice | np.ndarray
"""Which rows: a slice with a start and a stop, or numbers in any order. Not none."""


def broken(path: str, name: str, wanted: Wanted, words: str) -> RecordError:
    """Return the error of rows of which one is broken; it names the first, which is right if it is the only one."""
    return RecordError(path, -1, f"{name}[{wanted.start if isinstance(wanted, slice) else wanted[0]}]", words)


class ChunkedRows:
    """Gives rows of one array, in any thread: always copies, as a sample must not keep a chunk, nor change it.

    Args:
        empty: no rows, of the array's dtype and with the shape of its rows.
        rows: of a chunk.
        read: returns the rows of a chunk, given its number.
        cache: keeps chunks, under keys that begin with `key`; None where `read` costs nothing.
        is_safe: whether no library's code runs, which a damaged file may crash.

    >>> rows = ChunkedRows(np.zeros(0, int), 2, lambda number: np.array([number * 2, number * 2 + 1]))
    >>> rows.take(slice(1, 4)), rows.take(np.array([5, 0]))
    (array([1, 2, 3]), array([5, 0]))
    """

    def __init__(
        self,
        empty: np.ndarray,
        rows: int,
        read: Callable[[int], np.ndarray],
        cache: ChunkCache[np.ndarray] | None = None,
        key: tuple[Hashable, ...] = (),
        *,
        is_safe: bool = False,
    ) -> None:
        self._empty, self._rows, self._read, self._cache, self._key = empty, rows, read, cache, key
        self.is_safe = is_safe

    def take(self, wanted: Wanted) -> np.ndarray:
        """Return rows.

        Raises:
            RecordError: they are broken.
        """
        rows = self._rows
        if isinstance(wanted, slice):
            return self._span(wanted.start, wanted.stop)
        numbers = wanted // rows
        first = int(numbers[0])
        if (numbers == first).all():
            return np.take(self._chunk(first), wanted - first * rows, axis=0)
        found = np.empty((len(wanted), *self._empty.shape[1:]), self._empty.dtype)
        for number in set(numbers.tolist()):
            places = np.flatnonzero(numbers == number)
            found[places] = self._chunk(number)[wanted[places] - number * rows]
        return found

    def holds(self, wanted: np.ndarray) -> bool:
        """Return whether no library's code runs for these rows."""
        cache = self._cache
        return self.is_safe or (
            cache is not None
            and all(cache.peek((*self._key, at)) is not None for at in set((wanted // self._rows).tolist()))
        )

    def _span(self, start: int, stop: int) -> np.ndarray:
        rows = self._rows
        number = start // rows
        if start < stop <= (number + 1) * rows:
            if self._cache is not None and stop - start == rows and self._cache.peek((*self._key, number)) is None:
                chunk = self._read(number)  # nobody else has it, and nobody needs it again
                return chunk if chunk.flags.writeable else chunk.copy()
            return self._chunk(number)[start - number * rows : stop - number * rows].copy()
        parts = [
            self._chunk(at)[max(0, start - at * rows) : stop - at * rows]
            for at in range(number, -(-stop // rows) if start < stop else number)
        ]
        return np.concatenate([self._empty, *parts])

    def _chunk(self, number: int) -> np.ndarray:
        if self._cache is None:
            return self._read(number)
        return self._cache.get((*self._key, number), partial(self._read, number))


class Values:
    """Gives the values of one field of one file, in any thread: `decode` makes them of rows.

    It raises ValueError if one is broken; the file's path and the array's name are for messages.
    """

    def __init__(
        self, rows: ChunkedRows, decode: Callable[[np.ndarray], Sequence[Any] | np.ndarray], path: str, name: str
    ) -> None:
        self._rows, self._decode, self._path, self._name = rows, decode, path, name
        self.holds = rows.holds

    def take(self, wanted: Wanted) -> Sequence[Any] | np.ndarray:
        """Return values: copies.

        Raises:
            RecordError: one is broken; it is named if it is the only one.
        """
        values = self._rows.take(wanted)
        try:
            return self._decode(values)
        except SourceError:
            raise
        except ValueError as error:
            raise broken(self._path, self._name, wanted, str(error)) from error


class RaggedValues:
    """Arrays that differ in shape, stored as all elements, where each array begins, and its shape.

    Args:
        path: of the file, for messages.
        name: of the field there.
        field: bytes, or the shape of all, None where they differ.
        counts: of the elements, and of the arrays.
        parts: the elements, and int64 each: where arrays begin, and their shapes.
    """

    def __init__(
        self, path: str, name: str, field: Field, counts: tuple[int, int], parts: Sequence[ChunkedRows]
    ) -> None:
        self._path, self._name = path, name
        self._is_bytes, self._wide = field.kind == "bytes", field.shape or (None,)
        self._total, self._count = counts
        self._elements, self._starts, self._shapes = parts

    def all_starts(self) -> np.ndarray:
        """Return where each array begins."""
        return self._starts.take(slice(0, self._count))

    def holds(self, wanted: np.ndarray) -> bool:
        """Return whether no library's code runs for these."""
        return self._elements.is_safe and self._starts.is_safe and self._shapes.is_safe

    def take(self, wanted: Wanted) -> list[Any]:
        """Return arrays.

        Raises:
            RecordError: one does not lie within the elements, or is of another shape.
        """
        found = [self._elements.take(span).reshape(shape) for shape, span in self._places(wanted)]
        return [one.tobytes() for one in found] if self._is_bytes else found

    def _places(self, wanted: Wanted) -> Iterator[tuple[list[int], slice]]:
        starts, shapes = self._starts.take(wanted).tolist(), self._shapes.take(wanted).tolist()
        for start, shape in zip(starts, shapes, strict=True):
            stop = start + math.prod(shape)
            fits = all(size >= 0 and other in (None, size) for size, other in zip(shape, self._wide, strict=True))
            if not fits or not 0 <= start <= stop <= self._total:
                words = f"elements {start} to {stop} of {self._total}, in the shape {shape}, of {self._wide}"
                raise broken(self._path, self._name, wanted, words)
            yield shape, slice(start, stop)


def native(values: Any) -> Any:
    """Return numbers in this machine's byte order; of bools, those that a file has as other bytes than 0 and 1 too."""
    dtype = values.dtype
    if dtype.kind == "b":
        return np.ascontiguousarray(values).view(np.uint8) != 0
    return values if dtype.isnative else values.astype(dtype.newbyteorder("="))


def unsigned(values: Any) -> Any:
    """Return signed integers as the unsigned ones of the same bits, in this machine's byte order.

    >>> unsigned(np.array([-1, 5], ">i2"))
    array([65535,     5], dtype=uint16)
    """
    return native(values).view(f"u{values.dtype.itemsize}")
