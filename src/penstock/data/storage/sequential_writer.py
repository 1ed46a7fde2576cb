"""Writes a file in order, through gzip where its name ends in .gz or .tgz; equal data give equal bytes each time."""

from __future__ import annotations

import gzip

from penstock.core.errors import SourceError

_BUFFER_NBYTES = 1 << 18


class SequentialWriter:
    """Writes a new file from its beginning to its end."""

    def __init__(self, path: str) -> None:
        try:
            self._file = open(path, "wb", _BUFFER_NBYTES)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise SourceError(f"{path} cannot be written: {error}") from error
        compresses = path.endswith((".gz", ".tgz"))
        self._gzip = gzip.GzipFile("", "wb", fileobj=self._file, mtime=0) if compresses else None

    def write(self, data: bytes) -> None:
        """Add some bytes."""
        if self._gzip is not None:
            self._gzip.write(data)
        else:
            self._file.write(data)

    def close(self) -> None:
        """Finish the file."""
        try:
            if self._gzip is not None:
                self._gzip.close()
        finally:
            self._file.close()
