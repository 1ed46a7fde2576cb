"""A file that is copied into the cache while somebody reads it."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from typing import Any

from penstock.core.errors import SourceError
from penstock.feed.sources.cache import Filling


class CopyingFile(io.RawIOBase):
    """A file that is copied while it is read. The copy is finished when all of it has been read, or nearly.

    Args:
        file: read in order; it is closed with this one. A reader that leaves a gap leaves it out of the copy.
        filling: the copy.
        has_rest: says whether the bytes from some place on can be read without waiting long.
    """

    def __init__(self, file: io.RawIOBase, filling: Filling, has_rest: Callable[[int], bool]) -> None:
        super().__init__()
        self._file = file
        self._filling = filling
        self._has_rest = has_rest

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place."""
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        """Read, and copy what the copy lacks."""
        start = self._file.tell()
        count: int = self._file.readinto(buffer)
        known = self._filling.written - start
        if self._filling.is_open and 0 <= known < count:
            try:
                self._filling.write(memoryview(buffer).cast("B")[known:count])
                if self._filling.written == self._filling.nbytes:
                    self._filling.finish()
            except SourceError as error:  # the disk is full: what is read is good all the same
                warnings.warn(f"not kept: {error}", RuntimeWarning, stacklevel=2)
                self._filling.close()
        return count

    def close(self) -> None:
        """Close the file, and finish the copy or remove it."""
        if self.closed:
            return
        try:
            # Formats stop at their own end, and some bytes of padding may follow.
            if self._filling.is_open and self._filling.written and self._has_rest(self._filling.written):
                self.seek(self._filling.written)
                while self.read(1 << 20):
                    pass
        finally:
            self._filling.close()
            self._file.close()
            super().close()
