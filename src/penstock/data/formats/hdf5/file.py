"""One HDF5 file in one process: a map of its bytes, without the HDF5 library, and its datasets, with it."""

from __future__ import annotations

import mmap
import os
import threading
import zlib
from typing import Any

import numpy as np

from penstock.core.errors import RecordError, SourceError
from penstock.data.formats.column_source import FileColumns
from penstock.data.optional import need
from penstock.data.rows import LIBRARY_ERRORS
from penstock.data.storage.open_descriptors import OwnedDescriptor

_READS_RANGES = hasattr(os, "preadv")  # not on Windows
_DEFLATE, _FLETCHER32 = 1, 3
_CHECKSUM_NBYTES = 4
_PIECE_NBYTES = 1 << 20
MAX_RATIO = 1032
"""What deflate packs best: https://zlib.net/zlib_tech.html"""


class HDF5File:
    """A file that is opened when something is read, by any thread, and closed with the last reference to it."""

    def __init__(self, info: FileColumns) -> None:
        self.path, self.nbytes = info.path, info.nbytes
        self._lock = threading.Lock()
        self._opened: OwnedDescriptor | None = None
        """What is read by until there is a map, which has a descriptor of its own."""
        self._map: mmap.mmap | None = None
        self._library: Any = None
        self._datasets: dict[str, Any] = {}
        self._unchecked: dict[str, set[tuple[int, ...]]] = {}
        """Where chunks begin that deflate may have packed more in than is allowed: they are looked at once."""

    def mapped(self) -> mmap.mmap:
        """Return the file's bytes, once it is known that all are still there: those of a file cut off are a SIGBUS.

        Raises:
            SourceError: it is shorter or longer than it was.
        """
        found = self._map
        try:
            if found is None:
                with open(self.path, "rb") as file:
                    found = self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._opened = None
            there = found.size()  # an fstat
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise SourceError(f"{self.path} cannot be opened: {error}") from error
        self._check_size(there if there != self.nbytes else len(found))
        return found

    def read_into(self, target: np.ndarray, offset: int) -> None:
        """Fill a contiguous array with the file's bytes from `offset` on, all of which are within the file.

        In order, a tenth faster than a copy of the map, page by page.

        Raises:
            SourceError: the file is shorter or longer than it was, or cannot be read.
        """
        left = target.reshape(-1).view(np.uint8).data
        if self._map is not None or not _READS_RANGES:
            left[:] = memoryview(self.mapped())[offset : offset + left.nbytes]
            return
        try:
            opened = self._opened
            if opened is None:
                opened = self._opened = OwnedDescriptor(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))
            self._check_size(os.fstat(opened.number).st_size)
            while left.nbytes:
                count = os.preadv(opened.number, [left], offset)
                if not count:
                    self._check_size(os.fstat(opened.number).st_size)
                left, offset = left[count:], offset + count
        except OSError as error:
            raise SourceError(f"{self.path} cannot be read: {error}") from error

    def _check_size(self, there: int) -> None:
        if there != self.nbytes:
            raise SourceError(
                f"{self.path} has {there} bytes, and had {self.nbytes} when it was opened first; open it again"
            )

    def view(self, offset: int, nbytes: int, key: object) -> np.ndarray:
        """Return bytes of the file, read-only.

        Raises:
            RecordError: the file ends before.
        """
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            words = f"{nbytes} bytes are needed there, and the file has {self.nbytes} in all"
            raise RecordError(self.path, offset, key, words)
        return np.frombuffer(self.mapped(), np.uint8, nbytes, offset)

    def rows(self, name: str, start: int, stop: int, max_nbytes: int) -> np.ndarray:
        """Return rows `start` to `stop` of a dataset, all of one chunk, read by the HDF5 library.

        Raises:
            RecordError: it cannot, or a chunk unpacks to more than `max_nbytes`.
        """
        try:
            with self._lock:
                dataset = self._datasets.get(name)
                if dataset is None:
                    if self._library is None:
                        self._library = need("h5py", "hdf5").File(self.path, "r")
                    dataset = self._library[name]
                    self._unchecked[name] = _large_chunks(dataset, max_nbytes)
                    self._datasets[name] = dataset
                self._check_chunks(dataset, name, start, max_nbytes)
                try:
                    return np.asarray(dataset[start:stop])
                except OSError as error:
                    # To read text of a chunk that was never written, the library writes its fill value first.
                    if dataset.ndim != 1 or "no write intent" not in str(error):
                        raise
                    return np.full(stop - start, dataset.fillvalue, object)
        except RecordError:
            raise
        except LIBRARY_ERRORS as error:
            words = f"the HDF5 library failed: {type(error).__name__}: {error}"
            raise RecordError(self.path, -1, f"{name}[{start}]", words) from error

    def _check_chunks(self, dataset: Any, name: str, row: int, max_nbytes: int) -> None:
        """Raise RecordError if a chunk of a row unpacks to too much: the library takes memory until all of it fits."""
        unchecked = self._unchecked[name]
        for place in [one for one in unchecked if one[0] <= row < one[0] + dataset.chunks[0]]:
            skipped, data = dataset.id.read_direct_chunk(place)
            created = dataset.id.get_create_plist()
            for turn in reversed(range(created.get_nfilters())):
                code = created.get_filter(turn)[0]
                if skipped >> turn & 1:
                    continue
                if code == _FLETCHER32:
                    data = data[:-_CHECKSUM_NBYTES]
                elif code != _DEFLATE or _inflates_to(data, max_nbytes):
                    break
                else:
                    words = f"a chunk of {len(data)} bytes unpacks to more than max_record_nbytes={max_nbytes}"
                    raise RecordError(self.path, -1, f"{name}[{row}]", words)
            unchecked.remove(place)


def _large_chunks(dataset: Any, max_nbytes: int) -> set[tuple[int, ...]]:
    """Return where the chunks of a dataset begin of which deflate may make more than `max_nbytes`."""
    created, found = dataset.id.get_create_plist(), set[tuple[int, ...]]()
    codes = [created.get_filter(number)[0] for number in range(created.get_nfilters())]
    if _DEFLATE in codes and hasattr(dataset.id, "chunk_iter"):

        def collect(one: Any) -> None:
            if one.size * MAX_RATIO > max_nbytes:
                found.add(one.chunk_offset)

        dataset.id.chunk_iter(collect)
    return found


def _inflates_to(data: bytes, max_nbytes: int) -> bool:
    """Return whether what deflate packed has no more than `max_nbytes`, or is broken: that is the library's to say.

    >>> packed = zlib.compress(bytes(1000))
    >>> _inflates_to(packed, 1000), _inflates_to(packed, 999), _inflates_to(b"no", 0)
    (True, False, True)
    """
    inflating, nbytes = zlib.decompressobj(), 0
    try:
        while not inflating.eof and (piece := inflating.decompress(data, _PIECE_NBYTES)):
            nbytes, data = nbytes + len(piece), inflating.unconsumed_tail
            if nbytes > max_nbytes:
                return False
    except zlib.error:
        pass
    return True
