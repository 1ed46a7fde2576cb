"""Parquet files: their rows by number, row group by row group.

See types.py for the types that are read, and how arrays are written ("raw" by default). A process keeps a few files
open. No handle crosses a fork, and no two threads read by one. Columns of other fields are not read.

What a row group unpacks to is known from the footer where all of its values have a fixed width, and checked before
pyarrow unpacks it. Texts and lists may be many times what the footer states: each row may have what a dictionary holds
once. They are unpacked some MiB at a time, and checked as they come. A page with more values than the row group has
rows is pyarrow's to refuse.

Reading rows in a random order across row groups unpacks each of them many times. `ChunkShuffle`, or `shuffle=True` of
penstock's DataLoader, reads from a few row groups at a time.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.core.errors import SourceError
from penstock.core.per_process import PerProcess
from penstock.data.formats.arrow.table_source import TableSource, translate_errors
from penstock.data.formats.arrow.types import Layout
from penstock.data.formats.arrow.writer import TableWriter
from penstock.data.optional import need
from penstock.data.schema import Schema
from penstock.data.storage.storage import Storage

_TAIL_NBYTES = 64 << 10
_MOST_FOOTER_NBYTES = 256 << 20
_PIECE_NBYTES = 16 << 20
_FEWEST_ROWS, _MOST_ROWS = 16, 4096
"""Of a row group, that are unpacked at once where each of them may be as large as its column's dictionary."""
_MOST_IDLE = 8
"""Files that are open and not being read."""
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}


class ParquetSource(TableSource):
    """Rows of Parquet files; see the module."""

    def scan(self, storage: Storage) -> Iterable[tuple[list[int], Any]]:
        """Yield the rows of each row group of a file, and its schema, for each file; only footers are read."""
        self._opened = PerProcess(partial(_OpenFiles, storage), _OpenFiles.close)
        for path in self._paths:
            metadata = footer(storage, path)
            with translate_errors(path):
                rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
                yield rows, _open(need("pyarrow", "parquet").BufferReader(b""), metadata).schema_arrow

    def batches(self, file: int, number: int, columns: Iterable[tuple[str, ...]]) -> Iterator[tuple[Any, int]]:
        """Yield a row group's record batches, and the bytes that each has."""
        opened = self._opened.get()
        known = opened.known(self._paths[file], tuple(".".join(column) for column in columns))
        rows = known.rows_at_once(number, self._max_group_nbytes)
        reader = opened.take(known)
        try:
            for batch in reader.iter_batches(rows, row_groups=[number], columns=known.columns, use_threads=False):
                yield batch, batch.nbytes
        except OSError as error:
            if "decrypt" not in str(error):
                raise
            raise SourceError(
                f"{known.first_encrypted(reader, number)} is encrypted; leave it out with fields=, or write the file "
                "without encryption"
            ) from error
        opened.idle.append((known.local, reader))

    def close(self) -> None:
        """Close the files that this process has open."""
        self._opened.close()
        super().close()


class _OpenFiles:
    """The footers that a process has read, and the last few files that it has read from."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[tuple[str, tuple[str, ...]], _Footer] = {}
        self.idle: deque[tuple[str, Any]] = deque(maxlen=_MOST_IDLE)
        """Paths and files; those that a thread reads are not among them."""

    def known(self, path: str, columns: tuple[str, ...]) -> _Footer:
        found = self._known.get((path, columns))
        if found is None:
            local = self._storage.local(path)
            reader = _open(local)
            self.idle.append((local, reader))
            found = self._known[path, columns] = _Footer.of(reader.metadata, local, columns)
        return found

    def take(self, known: _Footer) -> Any:
        """Return a file that no other thread has."""
        for entry in tuple(self.idle):
            if entry[0] == known.local:
                with contextlib.suppress(ValueError):  # another thread has taken it
                    self.idle.remove(entry)
                    return entry[1]
        return _open(known.local, known.metadata)

    def close(self) -> None:
        self._known.clear()
        self.idle.clear()


def _open(file: Any, metadata: Any = None) -> Any:
    open_file = need("pyarrow.parquet", "parquet").ParquetFile
    return open_file(file, metadata=metadata, page_checksum_verification=True)


@dataclass(frozen=True, slots=True)
class _Footer:
    """What a process knows of a file of which some columns are read."""

    metadata: Any
    """pyarrow's FileMetaData."""
    local: str
    columns: tuple[str, ...]
    """Dotted paths, of leaves or of what holds them."""
    row_nbytes: int
    """Of these columns, where all have one value in each row, of a fixed width; else 0."""

    @classmethod
    def of(cls, metadata: Any, local: str, columns: tuple[str, ...]) -> _Footer:
        widths, wanted = [], set(columns)
        for leaf in map(metadata.schema.column, range(metadata.num_columns)):
            parts = leaf.path.split(".")
            if any(".".join(parts[:end]) in wanted for end in range(1, len(parts) + 1)):
                width = _WIDTHS.get(leaf.physical_type, max(0, leaf.length))
                widths.append(0 if leaf.max_repetition_level else width)
        return cls(metadata, local, columns, sum(widths) if all(widths) else 0)

    def rows_at_once(self, number: int, most_nbytes: int) -> int:
        """Return how many rows of a row group to unpack at once; raise SourceError if it states too many bytes.

        pyarrow makes room for as many, and shrinks it in the end.
        """
        group = self.metadata.row_group(number)
        rows: int = group.num_rows
        nbytes = rows * self.row_nbytes or group.total_byte_size
        if not 0 <= nbytes <= most_nbytes:
            raise SourceError(
                f"its row group has {nbytes} bytes unpacked, all of which are held to read a row: write the file with "
                f"smaller ones (row_group_size=), or raise max_group_nbytes, which is {most_nbytes}"
            )
        if not self.row_nbytes:
            rows = min(rows, _MOST_ROWS, max(_FEWEST_ROWS, _PIECE_NBYTES * rows // max(1, nbytes)))
        return max(1, rows)

    def first_encrypted(self, reader: Any, number: int) -> str:
        for column in self.columns:
            try:
                next(reader.iter_batches(1, row_groups=[number], columns=[column], use_threads=False), None)
            except OSError:
                return f"column {column!r}"
        return "one of its columns"


def footer(storage: Storage, path: str) -> Any:
    """Return a file's footer, pyarrow's FileMetaData; its end is all that is read.

    Raises:
        SourceError: it is no Parquet file, or its footer is damaged.
    """
    pa, parquet = need("pyarrow", "parquet"), need("pyarrow.parquet", "parquet")
    nbytes = storage.nbytes(path)
    tail = _tail(storage, path, min(nbytes, _TAIL_NBYTES))
    if nbytes >= 12 and tail[-4:] == b"PARE":
        raise SourceError(f"{path} is a Parquet file whose footer is encrypted, which is not read; decrypt it first")
    if nbytes < 12 or tail[-4:] != b"PAR1":
        raise SourceError(f"{path} is no Parquet file: it has {nbytes} bytes, and does not end with PAR1")
    needed = int.from_bytes(tail[-8:-4], "little") + 8
    if needed > min(nbytes, _MOST_FOOTER_NBYTES):
        raise SourceError(f"{path}: its footer should have {needed} bytes, and it has {nbytes}")
    found = tail[-needed:] if needed <= len(tail) else _tail(storage, path, needed)
    with translate_errors(path, "its footer cannot be read"):
        return parquet.read_metadata(pa.BufferReader(found))


def _tail(storage: Storage, path: str, nbytes: int) -> bytes:
    with translate_errors(path), storage.open(path, storage.nbytes(path) - nbytes) as file:
        return file.read(nbytes)


class ParquetWriter(TableWriter):
    """Writes samples to a new Parquet file.

    Args:
        path: of the file.
        schema: of the samples.
        compression: zstd, snappy, gzip, brotli, lz4 or none.
        layout: of arrays: "raw" (bytes, many times as fast to read), or "tensors" (lists, as other programs know them).

    Raises:
        SourceError: the file cannot be written, or samples of this schema cannot.
    """

    def __init__(self, path: str, schema: Schema, *, compression: str = "zstd", layout: Layout = "raw") -> None:
        super().__init__(path, schema, layout, partial(_sink, path, compression=compression))


def concat_files(parts: Sequence[str], path: str) -> None:
    """Make one file of several of `ParquetWriter`, in their order: row groups are read and written again.

    Raises:
        SourceError: one cannot be read, or `path` cannot be written.
    """
    parquet = need("pyarrow.parquet", "parquet")
    with translate_errors(path, "parts cannot be concatenated"):
        first = footer(Storage(), parts[0])
        groups = first.num_row_groups
        compression = first.row_group(0).column(0).compression if groups and first.num_columns else "zstd"
        sink = _sink(path, first.schema.to_arrow_schema(), compression.replace("UNCOMPRESSED", "none"))
        with sink:
            for part in parts:
                with parquet.ParquetFile(part) as file:
                    for number in range(file.num_row_groups):
                        sink.write_table(file.read_row_group(number, use_threads=False))


def _sink(path: str, schema: Any, compression: str) -> Any:
    pa, parquet = need("pyarrow", "parquet"), need("pyarrow.parquet", "parquet")
    repeating = [field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_integer(field.type)]
    with translate_errors(path, "it cannot be written"):
        return parquet.ParquetWriter(
            path,
            schema,
            compression=compression,
            use_dictionary=repeating or False,  # of floats it would make one of all NaNs
            write_statistics=repeating or False,
            write_page_checksum=True,
        )
