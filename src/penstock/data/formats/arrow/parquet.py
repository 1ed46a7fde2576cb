"""Parquet files: their rows by number, row group by row group.

See types.py for the types that are read, and how arrays are written ("raw" by default). A process keeps a few files
open. No handle crosses a fork, and no two threads read by one. Columns of other fields are not read.

What a row group unpacks to is checked before pyarrow unpacks it: its footer may state anything, and a page of some
bytes may be gigabytes. So the headers of its pages are read (parquet_pages.py), once in each process:

    fixed width    the values, nulls too, by their width
    as they are    the bytes of their pages
    dictionary     the values by the bytes of the dictionary; if that is too much by its longest entry; if that is too
                   much, too, what the rows' entries add up to
    DELTA_BYTE_ARRAY   each value may be all of its page, so few rows are unpacked at once, and checked as they come

Reading rows in a random order across row groups unpacks each of them many times. `ChunkShuffle`, or `shuffle=True` of
penstock's DataLoader, reads from a few row groups at a time.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.core.errors import SourceError
from penstock.core.per_process import PerProcess
from penstock.data.formats.arrow.parquet_pages import ChunkPages, read_pages
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
"""Of a row group, that are unpacked at once where their sizes differ."""
_LARGE_PAGE_NBYTES = 16 << 20
"""Of a page that counts beside its values: it is decompressed whole, and copied. Usual ones have a MiB."""
_LEVEL_NBYTES = 4
"""That each value of any length, and each in a list, takes at least."""
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
        rows = known.rows_at_once(number, self._max_record_nbytes)
        reader = opened.take(known)
        for batch in reader.iter_batches(rows, row_groups=[number], columns=known.columns, use_threads=False):
            yield batch, batch.nbytes
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


class _Unreadable(io.RawIOBase):
    """A file of more bytes than any, none of which can be read."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return offset if whence == os.SEEK_SET else 1 << 62

    def tell(self) -> int:
        return 1 << 62

    def read(self, nbytes: int = -1) -> bytes:
        return b""  # pyarrow 26 keeps what is raised here, and so the frames of its callers


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A column of values, as Parquet stores it."""

    index: int
    path: str
    width: int
    """Bytes of a value; 0 where values have any length."""
    is_repeated: bool
    """Whether a row may have several values."""


@dataclass(frozen=True, slots=True)
class _Footer:
    """What a process knows of a file of which some columns are read."""

    metadata: Any
    """pyarrow's FileMetaData."""
    local: str
    columns: tuple[str, ...]
    """Dotted paths, of leaves or of what holds them."""
    leaves: tuple[_Leaf, ...]
    """Of these columns."""
    checked: dict[int, int] = field(default_factory=dict)
    """How many rows of a row group to unpack at once, by number: of those whose sizes have been checked."""

    @classmethod
    def of(cls, metadata: Any, local: str, columns: tuple[str, ...]) -> _Footer:
        leaves, wanted = [], set(columns)
        for index, leaf in enumerate(map(metadata.schema.column, range(metadata.num_columns))):
            parts = leaf.path.split(".")
            if any(".".join(parts[:end]) in wanted for end in range(1, len(parts) + 1)):
                width = _WIDTHS.get(leaf.physical_type, max(0, leaf.length))
                leaves.append(_Leaf(index, leaf.path, width, leaf.max_repetition_level > 0))
        return cls(metadata, local, columns, tuple(leaves))

    def rows_at_once(self, number: int, most_nbytes: int) -> int:
        """Return how many rows of a row group to unpack at once; raise SourceError if it unpacks to too many bytes."""
        if number not in self.checked:
            self.checked[number] = self._check(number, most_nbytes)
        return self.checked[number]

    def _check(self, number: int, most_nbytes: int) -> int:
        if (
            not self.checked
        ):  # columns are encrypted in all row groups; to ask for each would take longer than to read one
            self._refuse_encrypted(number)
        group = self.metadata.row_group(number)
        rows: int = group.num_rows
        descriptor = os.open(self.local, os.O_RDONLY | os.O_CLOEXEC)
        try:
            chunks = [(leaf, _pages(descriptor, leaf, group.column(leaf.index))) for leaf in self.leaves]
        finally:
            os.close(descriptor)
        nbytes = sum(_certain_nbytes(leaf, pages, rows) for leaf, pages in chunks)
        _check_nbytes(nbytes, most_nbytes)
        repeating = [(leaf, pages) for leaf, pages in chunks if not leaf.width and pages.dictionary_values]
        for bound in (_by_dictionary, self._by_longest_entry, self._by_entries):
            if nbytes + sum(bound(leaf, pages, number) for leaf, pages in repeating) <= most_nbytes:
                break
        else:
            _check_nbytes(nbytes + sum(self._by_entries(*one, number) for one in repeating), most_nbytes)
        if all(leaf.width and not leaf.is_repeated for leaf in self.leaves):
            return max(1, rows)
        growing = sum(pages.largest_nbytes * -(-pages.delta_values // max(1, rows)) for _, pages in chunks)
        few = most_nbytes // (4 * growing) if growing else rows
        return max(1, min(rows, _MOST_ROWS, few, self._usual_rows(group)))

    def _refuse_encrypted(self, number: int) -> None:
        """Raise SourceError if a column is encrypted: to ask pyarrow 26 where its pages are would end the process.

        Reading it is an error, which comes before the first byte is read.
        """
        open_file = need("pyarrow.parquet", "parquet").ParquetFile
        reader = open_file(_Unreadable(), metadata=self.metadata, buffer_size=1)
        for columns in ([*self.columns], *([one] for one in self.columns)):
            try:
                next(reader.iter_batches(1, row_groups=[number], columns=columns, use_threads=False), None)
            except OSError as error:
                is_encrypted = "decrypt" in str(error)
            else:
                is_encrypted = False
            if not is_encrypted and len(columns) == len(self.columns):
                return
            if is_encrypted and len(columns) == 1:
                raise SourceError(
                    f"column {columns[0]!r} is encrypted; leave it out with fields=, or write the file "
                    "without encryption"
                )

    def _usual_rows(self, group: Any) -> int:
        """Return how many rows have about `_PIECE_NBYTES`: pyarrow makes room for them, and shrinks it in the end."""
        rows: int = _PIECE_NBYTES * group.num_rows // max(1, group.total_byte_size)
        return max(_FEWEST_ROWS, rows)

    def _by_longest_entry(self, leaf: _Leaf, pages: ChunkPages, number: int) -> int:
        pc = need("pyarrow.compute", "parquet")
        first = next(self._dictionaries(leaf, number, 1), None)
        if first is None:
            return 0
        return pages.dictionary_values * int(pc.max(pc.binary_length(first.dictionary)).as_py() or 0)

    def _by_entries(self, leaf: _Leaf, pages: ChunkPages, number: int) -> int:
        pc = need("pyarrow.compute", "parquet")
        found = 0
        for array in self._dictionaries(leaf, number, _MOST_ROWS):
            found += int(pc.sum(pc.binary_length(array.dictionary).take(array.indices)).as_py() or 0)
        return found

    def _dictionaries(self, leaf: _Leaf, number: int, rows: int) -> Iterator[Any]:
        """Yield a column's values as numbers of dictionary entries, which takes no memory for each value's bytes."""
        opened = need("pyarrow.parquet", "parquet").ParquetFile(
            self.local, metadata=self.metadata, read_dictionary=[leaf.path]
        )
        types = need("pyarrow", "parquet").types
        for batch in opened.iter_batches(rows, row_groups=[number], columns=[leaf.path], use_threads=False):
            array = batch.column(0)
            while not types.is_dictionary(array.type):
                if types.is_struct(array.type):
                    array = array.field(0)
                elif types.is_list(array.type) or types.is_large_list(array.type) or types.is_map(array.type):
                    array = array.values
                else:
                    raise SourceError(f"column {leaf.path!r} repeats long values, and its type is {array.type}")
            yield array
            if rows == 1:
                return


def _pages(descriptor: int, leaf: _Leaf, chunk: Any) -> ChunkPages:
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < (chunk.dictionary_page_offset or 0) < start:
        start = chunk.dictionary_page_offset
    try:
        return read_pages(descriptor, start, start + chunk.total_compressed_size, chunk.num_values)
    except (SourceError, OSError, OverflowError) as error:
        raise SourceError(
            f"column {leaf.path!r} is damaged ({error}); leave it out with fields=, or write the file anew"
        ) from error


def _certain_nbytes(leaf: _Leaf, pages: ChunkPages, rows: int) -> int:
    """Return what a chunk takes, without texts that its dictionary holds once: values, and large pages beside them."""
    if not leaf.is_repeated and pages.values != rows:
        raise SourceError(f"column {leaf.path!r} has {pages.values} values in {rows} rows")
    least = _LEVEL_NBYTES if leaf.is_repeated or not leaf.width else 0
    nbytes = pages.values * max(leaf.width, least) + (0 if leaf.width else pages.plain_nbytes)
    return nbytes + (2 * pages.largest_nbytes if pages.largest_nbytes > _LARGE_PAGE_NBYTES else 0)


def _by_dictionary(_: _Leaf, pages: ChunkPages, __: int) -> int:
    return pages.dictionary_values * pages.dictionary_nbytes


def _check_nbytes(nbytes: int, most_nbytes: int) -> None:
    if nbytes > most_nbytes:
        raise SourceError(
            f"its row group has {nbytes} bytes unpacked, all of which are held to read a row: write the file with "
            f"smaller ones (row_group_size=), or raise max_record_nbytes, which is {most_nbytes}"
        )


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
