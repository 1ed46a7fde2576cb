"""The global heap of an HDF5 file: where values of variable length lie, text and JPEGs for the most part.

It is read here because the library takes the memory that a reference states before it looks for the object (4 GiB),
and hangs on some collections that are damaged: on 6 of 3 000 mutants.

element       count of elements u32, address of a collection u64, number of the object in it u32; address 0 is nothing
collection    "GCOL", version 1, 3 bytes, its size u64; then objects
object        number u16, references u16, 4 bytes, size u64, the bytes, padding to 8; number 0 is free space
all numbers   little-endian; sizes and addresses of 8 bytes, in files of 4-byte ones the library is asked
"""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

import numpy as np

from penstock.data.formats.hdf5.file import HDF5File
from penstock.data.rows import ChunkCache

HEAP_REFERENCE = np.dtype([("count", "<u4"), ("address", "<u8"), ("number", "<u4")])
"""An element, as it is stored in the place of the value."""

_COLLECTION = struct.Struct("<4sB3xQ")
_OBJECT = struct.Struct("<HHxxxxQ")
_PLACE_NBYTES = 200
_OBJECT_NBYTES = 64
"""What a text, or bytes, takes beside its characters."""


class Collection(dict[int, tuple[int, int]]):
    """Where the objects of a collection lie in the file, and how many bytes each has, by their numbers.

    They can only be walked, and of short texts are thousands.
    """

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        return len(self) * _PLACE_NBYTES


class Heap:
    """Reads objects of a file's heap. Any thread may. Collections with more than `max_nbytes` are refused."""

    def __init__(self, file: HDF5File, cache: ChunkCache[Any], max_nbytes: int) -> None:
        self._file, self._cache, self._max_nbytes = file, cache, max_nbytes

    def take(self, references: np.ndarray, itemsize: int) -> list[bytes]:
        """Return the bytes that references, of `HEAP_REFERENCE`, refer to; `itemsize` of them are an element.

        Raises:
            ValueError: there is no such object, or it is shorter.
        """
        data, path = self._file.mapped(), self._file.path
        at, places, found = 0, Collection(), []
        for count, address, number in references.tolist():
            if count == 0 or address == 0:
                found.append(b"")
                continue
            if address != at:
                places = self._cache.get((path, "heap", address), partial(self._walk, data, address))
                at = address
            start, nbytes = places.get(number, (0, -1))
            if nbytes < count * itemsize:
                raise ValueError(f"the heap's collection at byte {address} has no object {number} of {count} elements")
            found.append(data[start : start + count * itemsize])
        return found

    def check(self, references: np.ndarray, itemsize: int) -> None:
        """Raise ValueError if the values of a row together take too much: each is a copy, also of one object."""
        nbytes = int(references["count"].sum(dtype=np.uint64)) * itemsize + references.size * _OBJECT_NBYTES
        if nbytes > self._max_nbytes:
            raise ValueError(f"its {references.size} values take {nbytes} bytes; max_record_nbytes={self._max_nbytes}")

    def _walk(self, data: Any, address: int) -> Collection:
        if address > len(data) - _COLLECTION.size:
            raise ValueError(f"it lies in the heap at byte {address}, and the file ends at {len(data)}")
        signature, version, nbytes = _COLLECTION.unpack_from(data, address)
        if signature != b"GCOL" or version != 1:
            raise ValueError(f"there is no collection of a heap at byte {address}")
        if not _COLLECTION.size <= nbytes <= min(self._max_nbytes, len(data) - address):
            raise ValueError(f"a heap collection of {nbytes} bytes at byte {address}; {self._max_nbytes} are the most")
        places = Collection()
        at, end = address + _COLLECTION.size, address + nbytes
        while at + _OBJECT.size <= end:
            number, _, size = _OBJECT.unpack_from(data, at)
            at += _OBJECT.size
            if number == 0 or at + size > end:
                break
            places[number] = (at, size)
            at += -(-size // 8) * 8
        return places
