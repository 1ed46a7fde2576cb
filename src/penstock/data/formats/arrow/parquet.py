"""Parquet files: their rows by number, row group by row group.

See types.py for the types that are read, and how arrays are written ("raw" by default). A file is opened for each row
group that is unpacked, with the footer that was read first: no handle stays open or crosses a fork, and threads read at
the same time. Columns of other fields are not read.

The size of a row group is checked in the footer and in the headers of its pages (parquet_pages.py) before Arrow unpacks
it, some MiB at a time.

Reading rows in a random order across row groups unpacks each of them many times. `ChunkShuffle`, or `shuffle=True` of
penstock's DataLoader, reads from a few row groups at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.core.errors import SourceError
from penstock.core.per_process import PerProcess
from penstock.data.formats.arrow.parquet_pages import Chunk, check_pages, column_chunks
from penstock.data.formats.arrow.table_source import (
    HELD_NBYTES,
    MOST_GROUP_NBYTES,
    Group,
    TableOptions,
    TableSource,
    translate_errors,
)
from penstock.data.formats.arrow.types import Layout
from penstock.data.formats.arrow.writer import TableWriter, arrow_schema
from penstock.data.optional import need
from penstock.data.schema import Errors, Schema, Selection
from penstock.data.storage.storage import Storage

_TAIL_NBYTES = 64 << 10
_MOST_FOOTER_NBYTES = 256 << 20
_PIECE_NBYTES = 16 << 20
_FEWEST_ROWS, _MOST_ROWS = 16, 4096
"""Of a row group, that are unpacked at once: each of them may be as large as its column's dictionary."""


def open_files(
    paths: list[str],
    storage: Storage,
    fields: Selection,
    errors: Errors,
    *,
    null: Mapping[str, Any] | None = None,
    objects: Sequence[str] = (),
    held_nbytes: int = HELD_NBYTES,
    max_group_nbytes: int = MOST_GROUP_NBYTES,
) -> ParquetSource:
    """Open Parquet files, one after another, as a source. Only their footers are read.

    Args:
        paths: of files with the same columns.
        storage: where they lie.
        fields: which fields samples have.
        errors: unused: reading a broken sample raises RecordError.
        null: the value of a field in rows where it is null, as in {"label": -1}; else text, bytes and objects are None,
            and reading a number or an array raises RecordError.
        objects: columns that are Python objects whatever they hold: lists that are no array, structs as dicts.
        held_nbytes: of unpacked row groups that a process keeps.
        max_group_nbytes: the most that a row group may have unpacked.

    Raises:
        SourceError: one cannot be read, has other columns, or columns that are no field.
    """
    options = TableOptions(null=null or {}, objects=objects, held_nbytes=held_nbytes, max_group_nbytes=max_group_nbytes)
    footers = [footer(storage, path) for path in paths]
    schemas, groups = [], []
    for file, (path, metadata) in enumerate(zip(paths, footers, strict=True)):
        with translate_errors(path):
            schemas.append(metadata.schema.to_arrow_schema())
            first = 0
            for number in range(metadata.num_row_groups):
                rows = metadata.row_group(number).num_rows
                groups.append(Group(file, number, first, rows))
                first += rows
    return ParquetSource(paths, groups, schemas, fields, options, storage)


class ParquetSource(TableSource):
    """Rows of Parquet files; see the module."""

    def __init__(
        self,
        paths: Sequence[str],
        groups: Sequence[Group],
        schemas: Sequence[Any],
        fields: Selection,
        options: TableOptions,
        storage: Storage,
    ) -> None:
        super().__init__(paths, groups, schemas, fields, options)
        self._storage = storage
        self._known: PerProcess[dict[str, tuple[Any, str, list[list[Chunk]]]]] = PerProcess(dict, dict.clear)

    def batches(self, group: Group, names: Iterable[str]) -> Iterator[Any]:
        """Yield a row group's record batches, of some MiB each: what they unpack to is known when they have."""
        parquet = need("pyarrow.parquet", "parquet")
        path, known = self._paths[group.file], self._known.get()
        if path not in known:
            serialised = footer_bytes(self._storage, path)
            known[path] = _metadata(serialised, path), self._storage.local(path), column_chunks(serialised[:-8], path)
        metadata, local, chunks = known[path]
        there = self.leaves(self._schemas[group.file])
        columns = [".".join(leaf.path) for name in names if not isinstance(leaf := there[name], str)]
        row_group = metadata.row_group(group.number)
        nbytes, limit = row_group.total_byte_size, self._options.max_group_nbytes
        if not 0 <= nbytes <= limit:
            raise SourceError(
                f"its row group has {nbytes} bytes unpacked, all of which are held to read a row: write the file with "
                f"smaller ones (row_group_size=), or raise max_group_nbytes, which is {limit}"
            )
        with translate_errors(path):
            check_pages(local, chunks[group.number], columns, limit)
        rows = min(_MOST_ROWS, max(_FEWEST_ROWS, _PIECE_NBYTES * row_group.num_rows // max(1, nbytes)))
        rows = min(rows, max(1, row_group.num_rows))  # Arrow makes room for as many, and shrinks it in the end
        with parquet.ParquetFile(local, metadata=metadata, page_checksum_verification=True) as file:
            yield from file.iter_batches(rows, row_groups=[group.number], columns=columns, use_threads=False)

    def close(self) -> None:
        """Let go of what this process keeps."""
        self._known.close()
        super().close()


def footer(storage: Storage, path: str) -> Any:
    """Return a file's footer, pyarrow's FileMetaData; its end is all that is read.

    Raises:
        SourceError: it is no Parquet file, or its footer is damaged.
    """
    return _metadata(footer_bytes(storage, path), path)


def footer_bytes(storage: Storage, path: str) -> bytes:
    """Return a file's footer as it lies there, with its length and the magic at the end.

    Raises:
        SourceError: it is no Parquet file.
    """
    nbytes = storage.nbytes(path)
    tail = _tail(storage, path, min(nbytes, _TAIL_NBYTES))
    if nbytes >= 12 and tail[-4:] == b"PARE":
        raise SourceError(f"{path} is a Parquet file whose footer is encrypted, which is not read; decrypt it first")
    if nbytes < 12 or tail[-4:] != b"PAR1":
        raise SourceError(f"{path} is no Parquet file: it has {nbytes} bytes, and does not end with PAR1")
    needed = int.from_bytes(tail[-8:-4], "little") + 8
    if needed > min(nbytes, _MOST_FOOTER_NBYTES):
        raise SourceError(f"{path}: its footer should have {needed} bytes, and it has {nbytes}")
    return tail[-needed:] if needed <= len(tail) else _tail(storage, path, needed)


def _metadata(serialised: bytes, path: str) -> Any:
    pa, parquet = need("pyarrow", "parquet"), need("pyarrow.parquet", "parquet")
    with translate_errors(path, "its footer cannot be read"):
        return parquet.read_metadata(pa.BufferReader(serialised))


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
        arrow = arrow_schema(schema, layout, path)
        super().__init__(path, schema, arrow, layout, _sink(path, arrow, compression))


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
