"""The global heap of an HDF5 file: where values of variable length lie, text and JPEGs for the most part.

element       count of elements u32, address of a collection u64, number of the object in it u32; address 0 is nothing
collection    "GCOL", version 1, 3 bytes, its size u64; then objects
object        number u16, references u16, 4 bytes, size u64, the bytes, padding to 8; number 0 is free space
all numbers   little-endian; sizes and addresses of 8 bytes, in files of 4-byte ones the library is asked
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from penstock.core.errors import RecordError
from penstock.data.chunks.chunk_cache import ChunkCache
from penstock.data.formats.hdf5.file import HDF5File

_COLLECTION = struct.Struct("<4sB3xQ")
_OBJECT = struct.Struct("<HHxxxxQ")


@dataclass(frozen=True, slots=True)
class HeapCollection:
    """Objects that were read together."""

    data: np.ndarray
    starts: np.ndarray
    """By an object's number: where its bytes begin; 0 for one that is not there."""

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return self.data.nbytes + self.starts.nbytes

    @classmethod
    def parse(cls, data: np.ndarray) -> HeapCollection:
        """Look all objects up once: a collection of short texts has thousands, and they can only be walked."""
        starts = {}
        at, end, raw = _COLLECTION.size, len(data), data.data
        while at + _OBJECT.size <= end:
            number, _, nbytes = _OBJECT.unpack_from(raw, at)
            at += _OBJECT.size
            if number == 0 or at + nbytes > end:
                break
            starts[number] = at
            at += -(-nbytes // 8) * 8
        table = np.zeros(max(starts, default=0) + 1, np.int64)
        table[list(starts.keys())] = list(starts.values())
        return cls(data, table)

    def find(self, number: int) -> memoryview | None:
        """Return an object's bytes."""
        start = int(self.starts[number]) if number < len(self.starts) else 0
        if start == 0:
            return None
        _, _, nbytes = _OBJECT.unpack_from(self.data.data, start - _OBJECT.size)
        return self.data.data[start : start + nbytes]


class Heap:
    """Reads objects of a file's heap. Any thread may.

    Args:
        file: which.
        collections: those that were read.
        max_nbytes: one that is larger is refused.
    """

    def __init__(self, file: HDF5File, collections: ChunkCache[HeapCollection], max_nbytes: int) -> None:
        self._file = file
        self._most_nbytes = max_nbytes
        self._collections = collections

    def get(self, reference: Any, itemsize: int, key: object) -> memoryview:
        """Return the bytes that an element refers to.

        Args:
            reference: of `layout.HEAP_REFERENCE`.
            itemsize: the bytes of one of its elements.
            key: which sample, for messages.

        Raises:
            RecordError: there is no such object, or it is shorter.
        """
        count, address, number = reference.item()
        if count == 0 or address == 0:
            return memoryview(b"")
        found = self._collections.get((self._file.path, address), partial(self._read, address, key)).find(number)
        if found is None or len(found) < count * itemsize:
            raise RecordError(self._file.path, address, key, f"the heap has no object {number} of {count} elements")
        return found[: count * itemsize]

    def _read(self, address: int, key: object) -> HeapCollection:
        head = self._file.take(address, _COLLECTION.size, key)
        signature, version, nbytes = _COLLECTION.unpack(head.data)
        if signature != b"GCOL" or version != 1:
            raise RecordError(self._file.path, address, key, "there is no collection of a global heap")
        if not _COLLECTION.size <= nbytes <= self._most_nbytes:
            raise RecordError(
                self._file.path, address, key, f"a heap collection of {nbytes} bytes; {self._most_nbytes} are the most"
            )
        return HeapCollection.parse(self._file.take(address, nbytes, key))
