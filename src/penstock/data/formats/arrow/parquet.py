"""Parquet files: their rows by number, row group by row group.

See types.py for the types that are read, and how arrays are written ("raw" by default). A process keeps a few files
open. No handle crosses a fork, and no two threads read by one. Columns of other fields are not read. A file with a
column that is encrypted is refused.

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
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.core.errors import SourceError
from penstock.core.per_process import PerProcess
from penstock.data.formats.arrow.parquet_pages import ChunkPages, read_pages
from penstock.data.formats.arrow.table import TableSource, translate_arrow_errors
from penstock.data.formats.arrow.types import Layout
from penstock.data.formats.arrow.writer import TableWriter
from penstock.data.optional import need
from penstock.data.schema import Schema
from penstock.data.storage.storage import Storage

_TAIL_NBYTES = 64 << 10
_MOST_FOOTER_NBYTES = 256 << 20
_SIGNATURE_NBYTES = 28
"""Behind the footer of a file with encrypted columns, where the footer itself is not."""
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

    def scan(self, paths: Sequence[str], storage: Storage, max_record_nbytes: int) -> Iterable[tuple[list[int], Any]]:
        """Yield the rows of each row group of a file, and its schema, for each file; only footers are read."""
        self._opened = PerProcess(partial(_OpenFiles, storage), _OpenFiles.close)
        for path in paths:
            metadata = footer(storage, path)
            with translate_arrow_errors(path):
                rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
                yield rows, _open(need("pyarrow", "parquet").BufferReader(b""), metadata).schema_arrow

    def batches(self, file: int, group: int, columns: Sequence[tuple[str, ...]]) -> Iterator[tuple[Any, int]]:
        """Yield a row group's record batches, and the bytes that each has."""
        opened, dotted = self._opened.get(), tuple(map(".".join, columns))
        known = opened.known(self._paths[file])
        rows = known.rows_at_once(group, dotted, self._max_record_nbytes)
        reader = opened.take(known)
        for batch in reader.iter_batches(rows, row_groups=[group], columns=dotted, use_threads=False):
            yield batch, batch.nbytes
        opened.idle.append((known.path, reader))

    def close(self) -> None:
        """Close the files that this process has open."""
        self._opened.close()
        super().close()


class _OpenFiles:
    """The footers that a process has read, and the last few files that it has read from."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[str, _KnownFile] = {}
        self.idle: deque[tuple[str, Any]] = deque(maxlen=_MOST_IDLE)
        """Local paths and files; those that a thread reads are not among them."""

    def known(self, path: str) -> _KnownFile:
        found = self._known.get(path)
        if found is None:
            local = self._storage.local(path)
            reader = _open(local)
            self.idle.append((local, reader))
            found = self._known[path] = _KnownFile(local, reader.metadata)
        return found

    def take(self, known: _KnownFile) -> Any:
        """Return a file that no other thread has."""
        for entry in tuple(self.idle):
            if entry[0] == known.path:
                with contextlib.suppress(ValueError):  # another thread has taken it
                    self.idle.remove(entry)
                    return entry[1]
        return _open(known.path, known.metadata)

    def close(self) -> None:
        self._known.clear()
        self.idle.clear()


def _open(file: Any, metadata: Any = None, **options: Any) -> Any:
    open_file = need("pyarrow.parquet", "parquet").ParquetFile
    return open_file(file, metadata=metadata, page_checksum_verification=True, **options)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A column of values, as Parquet stores it."""

    index: int
    path: str
    width: int
    """Bytes of a value; 0 where values have any length."""
    is_repeated: bool
    """Whether a row may have several values."""


class _KnownFile:
    """What a process knows of a local file: its footer, and what its row groups unpack to."""

    def __init__(self, path: str, metadata: Any) -> None:
        self.path = path
        self.metadata = metadata
        self._leaves: dict[tuple[str, ...], list[_Leaf]] = {}
        self._checked: dict[tuple[int, tuple[str, ...]], int] = {}

    def rows_at_once(self, number: int, columns: tuple[str, ...], most_nbytes: int) -> int:
        """Return how many rows of a row group to unpack at once; raise SourceError if it unpacks to too many bytes.

        Args:
            number: of the row group.
            columns: dotted paths, of leaves or of what holds them.
            most_nbytes: that these may have unpacked.
        """
        if columns not in self._leaves:
            self._leaves[columns] = self._leaves_of(columns)
        if (number, columns) not in self._checked:
            self._checked[number, columns] = self._check(number, self._leaves[columns], most_nbytes)
        return self._checked[number, columns]

    def _leaves_of(self, columns: tuple[str, ...]) -> list[_Leaf]:
        found, wanted = [], set(columns)
        for index, leaf in enumerate(map(self.metadata.schema.column, range(self.metadata.num_columns))):
            parts = leaf.path.split(".")
            if any(".".join(parts[:end]) in wanted for end in range(1, len(parts) + 1)):
                width = _WIDTHS.get(leaf.physical_type, max(0, leaf.length))
                found.append(_Leaf(index, leaf.path, width, leaf.max_repetition_level > 0))
        return found

    def _check(self, number: int, leaves: list[_Leaf], most_nbytes: int) -> int:
        group = self.metadata.row_group(number)
        rows: int = group.num_rows
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            chunks = [(leaf, _pages(descriptor, leaf, group.column(leaf.index))) for leaf in leaves]
        finally:
            os.close(descriptor)
        nbytes = sum(_certain_nbytes(leaf, pages, rows) for leaf, pages in chunks)
        _check_nbytes(nbytes, most_nbytes)
        repeating = [(leaf, pages) for leaf, pages in chunks if not leaf.width and pages.dictionary_values]
        for bound in (_by_dictionary, self._by_longest_entry):
            if nbytes + sum(bound(leaf, pages, number) for leaf, pages in repeating) <= most_nbytes:
                break
        else:
            _check_nbytes(nbytes + sum(self._by_entries(leaf, number) for leaf, _ in repeating), most_nbytes)
        if all(leaf.width and not leaf.is_repeated for leaf in leaves):
            return max(1, rows)
        growing = sum(pages.largest_nbytes * -(-pages.delta_values // max(1, rows)) for _, pages in chunks)
        few = most_nbytes // (4 * growing) if growing else rows
        # pyarrow makes room for as many rows as it is asked for, and shrinks it in the end
        usual: int = max(_FEWEST_ROWS, _PIECE_NBYTES * rows // max(1, group.total_byte_size))
        return max(1, min(rows, _MOST_ROWS, few, usual))

    def _by_longest_entry(self, leaf: _Leaf, pages: ChunkPages, number: int) -> int:
        pc = need("pyarrow.compute", "parquet")
        for first in self._dictionaries(leaf, number, 1):
            return pages.dictionary_values * int(pc.max(pc.binary_length(first.dictionary)).as_py() or 0)
        return 0

    def _by_entries(self, leaf: _Leaf, number: int) -> int:
        pc = need("pyarrow.compute", "parquet")
        lengths = (
            pc.binary_length(array.dictionary).take(array.indices)
            for array in self._dictionaries(leaf, number, _MOST_ROWS)
        )
        return sum(int(pc.sum(one).as_py() or 0) for one in lengths)

    def _dictionaries(self, leaf: _Leaf, number: int, rows: int) -> Iterator[Any]:
        """Yield a column's values as numbers of dictionary entries, which takes no memory for each value's bytes."""
        opened = _open(self.path, self.metadata, read_dictionary=[leaf.path])
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
    with translate_arrow_errors(path, "its footer cannot be read"):
        metadata = parquet.read_metadata(pa.BufferReader(found))
    if metadata.serialized_size == needed - 8 - _SIGNATURE_NBYTES:
        raise SourceError(f"{path} is a Parquet file with encrypted columns, which is not read; decrypt it first")
    return metadata


def _tail(storage: Storage, path: str, nbytes: int) -> bytes:
    with translate_arrow_errors(path), storage.open(path, storage.nbytes(path) - nbytes) as file:
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


def _sink(path: str, schema: Any, compression: str) -> Any:
    pa, parquet = need("pyarrow", "parquet"), need("pyarrow.parquet", "parquet")
    repeating = [field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_integer(field.type)]
    with translate_arrow_errors(path, "it cannot be written"):
        return parquet.ParquetWriter(
            path,
            schema,
            compression=compression,
            use_dictionary=repeating or False,  # of floats it would make one of all NaNs
            write_statistics=repeating or False,
            write_page_checksum=True,
        )
