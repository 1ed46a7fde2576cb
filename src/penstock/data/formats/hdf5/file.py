"""One HDF5 file in one process: its bytes, without the HDF5 library, and its datasets, with it."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

from penstock.core.errors import RecordError, SourceError
from penstock.data.optional import need

LIBRARY_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    RuntimeError,
    SystemError,
    TypeError,
    ValueError,
)
"""What h5py raises for files that are broken, or use features that it lacks."""


class HDF5File:
    """A file that is opened when something is read. Any thread may.

    Args:
        path: of a local file.
        nbytes: its size when the source was opened.
    """

    def __init__(self, path: str, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self._lock = threading.RLock()
        self._descriptor = -1
        self._library: Any = None
        self._datasets: dict[str, Any] = {}

    def take(self, offset: int, nbytes: int, key: object) -> np.ndarray:
        """Return bytes of the file.

        Raises:
            RecordError: they are not there.
        """
        self._check(offset, nbytes, key)
        found = np.empty(nbytes, np.uint8)
        self.read(offset, found, key)
        return found

    def read(self, offset: int, into: np.ndarray, key: object) -> None:
        """Fill a contiguous array with bytes of the file.

        Raises:
            RecordError: they are not there.
        """
        nbytes = into.nbytes
        self._check(offset, nbytes, key)
        try:
            if self._descriptor < 0:
                self._open()
            done = os.preadv(self._descriptor, [into.data], offset)
            while 0 < done < nbytes:
                more = os.preadv(self._descriptor, [into.reshape(-1).view(np.uint8)[done:].data], offset + done)
                done = done + more if more else -1
        except OSError as error:
            raise RecordError(self.path, offset, key, f"cannot be read: {error}") from error
        if done != nbytes:
            raise RecordError(self.path, offset, key, f"the file ends before its {nbytes} bytes do")

    def read_rows(self, offset: int, indices: list[int], into: np.ndarray, name: str) -> None:
        """Fill a contiguous array with rows of a dataset that begins at a byte: a read for each, as all differ.

        Raises:
            RecordError: they are not there.
        """
        if self._descriptor < 0:
            self._open()
        nbytes, descriptor = into[0].nbytes, self._descriptor
        data = into.reshape(-1).view(np.uint8).data
        try:
            for start, index in zip(range(0, len(data), nbytes), indices, strict=True):
                if os.preadv(descriptor, [data[start : start + nbytes]], offset + index * nbytes) < nbytes:
                    self.read(offset + index * nbytes, into[start // nbytes], f"{name}[{index}]")
        except OSError as error:
            raise RecordError(self.path, offset, name, f"cannot be read: {error}") from error

    def _check(self, offset: int, nbytes: int, key: object) -> None:
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise RecordError(
                self.path, offset, key, f"{nbytes} bytes are needed there, and the file has {self.nbytes} in all"
            )

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows of a dataset, read by the HDF5 library.

        Raises:
            RecordError: it cannot.
        """
        try:
            with self._lock:
                dataset = self._datasets.get(name)
                if dataset is None:
                    if self._library is None:
                        self._library = need("h5py", "hdf5").File(self.path, "r")
                    dataset = self._datasets[name] = self._library[name]
                return np.asarray(dataset[start:stop])
        except LIBRARY_ERRORS as error:
            raise RecordError(self.path, -1, f"{name}[{start}]", _describe_error(error)) from error

    def close(self) -> None:
        """Close it."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
            self._datasets.clear()
            if self._library is not None:
                self._library.close()
                self._library = None

    def _open(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                return
            try:
                descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise SourceError(f"{self.path} cannot be opened: {error}") from error
            there = os.fstat(descriptor).st_size
            if there != self.nbytes:
                os.close(descriptor)
                raise SourceError(
                    f"{self.path} has {there} bytes, and had {self.nbytes} when it was opened first; open it again"
                )
            self._descriptor = descriptor


def _describe_error(error: BaseException) -> str:
    words = f"{type(error).__name__}: {error}"
    if "filter" in words:
        words += "; if a plugin brings the filter that packed it, import that (hdf5plugin) before reading"
    return f"the HDF5 library failed: {words}"
