"""A remote file that is copied into the cache while it is read."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from typing import Any

from penstock.core.errors import SourceError
from penstock.data.storage.cache.partial_copy import PartialCopy


class CopyingFile(io.RawIOBase):
    """A file that is copied while it is read. The copy is finished when the file has been read to its end, or nearly.

    Args:
        file: read in order; it is closed with this one. After a gap nothing more is copied.
        copy: the copy.
        has_rest: returns whether the bytes from an offset to the end can be read without a long wait.
    """

    def __init__(self, file: io.RawIOBase, copy: PartialCopy, has_rest: Callable[[int], bool]) -> None:
        super().__init__()
        self._file = file
        self._copy = copy
        self._has_rest = has_rest

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset."""
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        """Read, and append to the copy the bytes that it lacks."""
        start = self._file.tell()
        count: int = self._file.readinto(buffer)
        known = self._copy.written - start
        if self._copy.is_open and 0 <= known < count:
            try:
                self._copy.write(memoryview(buffer).cast("B")[known:count])
                if self._copy.written == self._copy.nbytes:
                    self._copy.finish()
            except SourceError as error:  # a full disk must not stop the reader
                warnings.warn(f"not kept: {error}", RuntimeWarning, stacklevel=2)
                self._copy.close()
        return count

    def close(self) -> None:
        """Close the file, and finish the copy or remove it."""
        if self.closed:
            return
        try:
            # Readers stop at the end of their format, which padding may follow.
            if self._copy.is_open and self._copy.written and self._has_rest(self._copy.written):
                self.seek(self._copy.written)
                while self.read(1 << 20):
                    pass
        finally:
            self._copy.close()
            self._file.close()
            super().close()
