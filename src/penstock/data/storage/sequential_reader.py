"""Reads a file in order; gzip, bzip2 and zstd are decompressed on the way, never more than is requested.

They are recognized by the file's first bytes, not by its name. zstd needs pyarrow (the extra "parquet").
"""

from __future__ import annotations

import bz2
import zlib
from typing import BinaryIO, Protocol

from penstock.core.errors import PenstockError, RecordError, SourceError
from penstock.data.optional import need
from penstock.data.storage.foreign_files import GZIP, ZSTD, is_packed, refuse_foreign
from penstock.data.storage.storage import Storage

READ_NBYTES = 1 << 18
"""Size of one read: small enough for a core's own cache, which the records are copied out of."""

_COMPRESSED_NBYTES = 1 << 14
"""Size of one read of compressed data. zlib copies what follows the end of a gzip member, which is expensive where
thousands of tiny members follow each other."""

_GZIP_WINDOW = 31  # zlib's `wbits` for a gzip header (16) and the largest window (15)


class _SupportsRead(Protocol):
    def read(self, nbytes: int, /) -> bytes: ...


class SequentialReader:
    """Reads one file from its beginning to its end. Used by one thread.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(b"header, record")
        ...     file.flush()
        ...     reader = SequentialReader(Storage(), file.name)
        ...     reader.skip(8), reader.take(100), reader.offset
        ...     reader.close()
        (8, b'record', 14)
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self.path = path
        self.key: object = 0
        """The record that is being read, for error messages; set by the caller."""
        self._file: BinaryIO = storage.open(path)
        self._source: _SupportsRead = self._file
        self._buffer_at = self._buffer_offset = 0
        self._buffer = b""
        self._buffer = self._read(READ_NBYTES)
        self.total: int | None = None
        """The file's size; None for what is packed, whose size is known only at the end."""
        try:
            self._unpack() if is_packed(self._buffer) else refuse_foreign(path, self._buffer)
        except BaseException:
            self._file.close()
            raise
        if self._source is not self._file:
            return
        if len(self._buffer) < READ_NBYTES:
            self.total = len(self._buffer)
        else:
            self.total = storage.nbytes(path)

    @property
    def offset(self) -> int:
        """The offset of the next byte, in the decompressed data."""
        return self._buffer_offset + self._buffer_at

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes: `nbytes` of them, or fewer where the file ends.

        Raises:
            RecordError: the compressed data are corrupt, or end too early.
            SourceError: the file cannot be read.
        """
        at = self._buffer_at
        end = at + nbytes
        if end <= len(self._buffer):
            self._buffer_at = end
            return self._buffer[at:end]
        if self.total is not None:  # a corrupt length must not allocate more than the file holds
            nbytes = min(nbytes, max(0, self.total - self.offset))
        found = [self._buffer[at : at + nbytes]]
        self._buffer_at += len(found[0])
        missing = nbytes - len(found[0])
        while missing > 0 and self._refill(max(missing, READ_NBYTES) if self.total is not None else READ_NBYTES):
            found.append(self._buffer[:missing])
            self._buffer_at = len(found[-1])
            missing -= self._buffer_at
        return b"".join(found)

    def ahead(self) -> tuple[bytes, int]:
        """Return bytes that have been read, and where the next one lies in them."""
        return self._buffer, self._buffer_at

    def skip(self, nbytes: int) -> int:
        """Skip the next bytes, and return how many there were: fewer than `nbytes` where the file ends."""
        missing = nbytes - (len(self._buffer) - self._buffer_at)
        if missing <= 0:
            self._buffer_at += nbytes
            return nbytes
        if self.total is not None and missing >= READ_NBYTES:
            start = self.offset
            self._buffer_offset, self._buffer, self._buffer_at = min(start + nbytes, self.total), b"", 0
            self._file.seek(self._buffer_offset)
            return self._buffer_offset - start
        while missing > 0 and self._refill(READ_NBYTES):
            self._buffer_at = min(missing, len(self._buffer))
            missing -= self._buffer_at
        return nbytes - missing

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _refill(self, nbytes: int) -> bool:
        self._buffer_offset += len(self._buffer)
        self._buffer_at = 0
        self._buffer = b""
        self._buffer = self._read(nbytes)
        return bool(self._buffer)

    def _unpack(self) -> None:
        self._file.seek(0)
        if self._buffer.startswith(GZIP):
            self._source = _GzipDecompressor(self._file)
        elif self._buffer.startswith(ZSTD):
            arrow = need("pyarrow", "parquet")
            self._source = arrow.CompressedInputStream(arrow.PythonFile(self._file, "r"), "zstd")
        else:
            self._source = bz2.BZ2File(self._file)
        self._buffer = b""

    def _read(self, nbytes: int) -> bytes:
        try:
            return self._source.read(nbytes)
        except PenstockError:
            raise
        except (zlib.error, EOFError) as error:
            raise RecordError(self.path, self.offset, self.key, f"the packed data are broken: {error}") from error
        except OSError as error:
            if self._source is not self._file:  # bzip2 and Arrow raise it of what is broken
                raise RecordError(self.path, self.offset, self.key, f"the packed data are broken: {error}") from error
            raise SourceError(f"{self.path} cannot be read at byte {self.offset}: {error}") from error


class _GzipDecompressor:
    """Decompresses gzip members, one after another, as far as is requested."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._compressed = b""
        self._decompressor = zlib.decompressobj(_GZIP_WINDOW)

    def read(self, nbytes: int) -> bytes:
        """Return up to `nbytes`; none at the end.

        Raises:
            EOFError: the compressed data end too early.
        """
        while True:
            if self._decompressor.eof:
                compressed = self._decompressor.unused_data or self._file.read(_COMPRESSED_NBYTES)
                compressed = compressed.lstrip(b"\0")  # tapes and some downloads end in zeros
                if not compressed:
                    return b""
                self._compressed = compressed
                self._decompressor = zlib.decompressobj(_GZIP_WINDOW)
            if not self._compressed:
                self._compressed = self._file.read(_COMPRESSED_NBYTES)
                if not self._compressed:
                    raise EOFError("they end early")
            decompressed = self._decompressor.decompress(self._compressed, nbytes)
            self._compressed = self._decompressor.unconsumed_tail
            if decompressed:
                return decompressed
