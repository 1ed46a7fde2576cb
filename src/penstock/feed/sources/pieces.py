"""A file's bytes in order, a piece at a time; what gzip packed is unpacked on the way, never more than is asked for.

Whether gzip packed it is told from its first two bytes, not from its name.
"""

from __future__ import annotations

import gzip
import io
import zlib
from typing import BinaryIO, Protocol

from penstock.core.errors import RecordError, SourceError
from penstock.feed.sources.storage import Storage

PIECE_NBYTES = 1 << 18
"""What is read at once: little enough for a core's own cache, which the records are copied out of."""

_PACKED_NBYTES = 1 << 14
"""What is unpacked at once. What follows the end of a gzip file is copied, which thousands of tiny ones make dear."""

_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31  # zlib's word for: a gzip header, and the largest window


class _Readable(Protocol):
    def read(self, nbytes: int, /) -> bytes: ...


class Pieces:
    """Reads one file from its beginning to its end. Used by one thread.

    Args:
        storage: opens it.
        path: the file.
        nbytes: what is read first; who looks at the beginning only needs little.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(b"header, record")
        ...     file.flush()
        ...     pieces = Pieces(Storage(), file.name)
        ...     pieces.skip(8), pieces.take(100), pieces.offset
        ...     pieces.close()
        (8, b'record', 14)
    """

    def __init__(self, storage: Storage, path: str, nbytes: int = PIECE_NBYTES) -> None:
        self.path = path
        self.key: object = 0
        """The record that is being read, for messages; whoever reads says it."""
        self._file: BinaryIO = storage.open(path)
        self._source: _Readable = self._file
        self._at = self._begin = 0
        self._piece = b""
        self._piece = self._read(nbytes)
        self.total: int | None = None
        """The file's bytes; None where gzip packed it, and only reading it tells."""
        if self._piece[:2] == _GZIP:
            self._source = _Gunzipped(self._file, self._piece)
            self._piece = b""
        elif len(self._piece) < nbytes:
            self.total = len(self._piece)
        else:
            self.total = storage.nbytes(path)

    @property
    def offset(self) -> int:
        """Where the next byte lies; in the unpacked data, where gzip packed the file."""
        return self._begin + self._at

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes: `nbytes` of them, or fewer where the file ends.

        Raises:
            RecordError: the packed data are corrupt, or end too early.
            SourceError: the file cannot be read.
        """
        at = self._at
        end = at + nbytes
        if end <= len(self._piece):
            self._at = end
            return self._piece[at:end]
        if self.total is not None:  # a length is not believed before memory is taken for it
            nbytes = min(nbytes, max(0, self.total - self.offset))
        found = [self._piece[at : at + nbytes]]
        self._at += len(found[0])
        missing = nbytes - len(found[0])
        while missing > 0 and self._next(max(missing, PIECE_NBYTES) if self.total is not None else PIECE_NBYTES):
            found.append(self._piece[:missing])
            self._at = len(found[-1])
            missing -= self._at
        return b"".join(found)

    def skip(self, nbytes: int) -> int:
        """Leave out the next bytes, and return how many there were: fewer than `nbytes` where the file ends.

        Raises:
            RecordError: the packed data are corrupt, or end too early.
            SourceError: the file cannot be read.
        """
        missing = nbytes - (len(self._piece) - self._at)
        if missing <= 0:
            self._at += nbytes
            return nbytes
        if self.total is not None and missing >= PIECE_NBYTES:
            begin = self.offset
            self._begin, self._piece, self._at = min(begin + nbytes, self.total), b"", 0
            self._file.seek(self._begin)
            return self._begin - begin
        while missing > 0 and self._next(PIECE_NBYTES):
            self._at = min(missing, len(self._piece))
            missing -= self._at
        return nbytes - missing

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _next(self, nbytes: int) -> bool:
        self._begin += len(self._piece)
        self._at = 0
        self._piece = b""
        self._piece = self._read(nbytes)
        return bool(self._piece)

    def _read(self, nbytes: int) -> bytes:
        try:
            return self._source.read(nbytes)
        except (zlib.error, EOFError) as error:
            raise RecordError(self.path, self.offset, self.key, f"the gzip data are broken: {error}") from error
        except OSError as error:
            raise SourceError(f"{self.path} cannot be read at byte {self.offset}: {error}") from error


class _Gunzipped:
    """Unpacks as much as is asked for; gzip files may be several, one after another."""

    def __init__(self, file: BinaryIO, begin: bytes) -> None:
        self._begin = io.BytesIO(begin)
        self._file = file
        self._packed = b""
        self._unpacking = zlib.decompressobj(_GZIP_WINDOW)

    def read(self, nbytes: int) -> bytes:
        """Return up to `nbytes`; none at the end.

        Raises:
            EOFError: the packed data end too early.
        """
        while True:
            if self._unpacking.eof:
                packed = self._unpacking.unused_data or self._more()
                packed = packed.lstrip(b"\0")  # tapes and some downloads end in zeros
                if not packed:
                    return b""
                self._packed = packed
                self._unpacking = zlib.decompressobj(_GZIP_WINDOW)
            if not self._packed:
                self._packed = self._more()
                if not self._packed:
                    raise EOFError("they end in their middle")
            unpacked = self._unpacking.decompress(self._packed, nbytes)
            self._packed = self._unpacking.unconsumed_tail
            if unpacked:
                return unpacked

    def _more(self) -> bytes:
        return self._begin.read(_PACKED_NBYTES) or self._file.read(_PACKED_NBYTES)


class Created:
    """A new file, written in order. A name that ends in .gz or .tgz has gzip pack it, into the same bytes each time.

    Raises:
        SourceError: it cannot be made.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file = open(path, "wb", PIECE_NBYTES)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise SourceError(f"{path} cannot be written: {error}") from error
        packs = path.endswith((".gz", ".tgz"))
        self._packing = gzip.GzipFile("", "wb", fileobj=self._file, mtime=0) if packs else None

    def write(self, data: bytes) -> None:
        """Add some bytes."""
        if self._packing is not None:
            self._packing.write(data)
        else:
            self._file.write(data)

    def close(self) -> None:
        """Finish the file."""
        try:
            if self._packing is not None:
                self._packing.close()
        finally:
            self._file.close()
