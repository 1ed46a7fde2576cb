"""Arrow IPC: files (Feather version 2), and streams as Hugging Face's datasets keeps them; record batches are groups.

Which batches there are, and how many rows each has, is taken from the messages' metadata: bodies stay unread. Files are
mapped into memory, and samples of batches that are not compressed are views of the map. ipc_messages.py describes the
format, types.py the types that are read and how arrays are written ("tensors" by default).

Nobody may write or shorten a file while it is mapped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from penstock.core.errors import SourceError
from penstock.core.per_process import PerProcess
from penstock.data.formats.arrow.ipc_messages import IpcFile, scan_file
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

_VIEW_NBYTES = 16 << 10


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
) -> ArrowSource:
    """Open Arrow IPC files or streams, one after another, as a source.

    Args:
        paths: of files with the same columns.
        storage: where they lie.
        fields: which fields samples have.
        errors: unused: reading a broken sample raises RecordError.
        null: the value of a field in rows where it is null, as in {"label": -1}; else text, bytes and objects are None,
            and reading a number or an array raises RecordError.
        objects: columns that are Python objects whatever they hold: lists that are no array, structs as dicts.
        held_nbytes: of unpacked batches that a process keeps, where they are compressed.
        max_group_nbytes: the most that a batch may have unpacked.

    Raises:
        SourceError: one cannot be read, has other columns, or columns that are no field.
    """
    options = TableOptions(null=null or {}, objects=objects, held_nbytes=held_nbytes, max_group_nbytes=max_group_nbytes)
    files = [scan_file(storage.local(path)) for path in paths]
    for file in files:
        if file.held_nbytes > max_group_nbytes:
            raise SourceError(
                f"{file.path}: {file.held_nbytes} bytes of dictionaries, or of batches in another byte order, have to "
                "be in memory to read any row; see max_group_nbytes"
            )
    groups = [
        Group(number, place, first, batch.rows)
        for number, file in enumerate(files)
        for place, (first, batch) in enumerate(zip(file.first_rows(), file.batches, strict=True))
    ]
    return ArrowSource(paths, groups, [file.schema for file in files], fields, options, files)


class ArrowSource(TableSource):
    """Rows of Arrow files; see the module."""

    def __init__(
        self,
        paths: Sequence[str],
        groups: Sequence[Group],
        schemas: Sequence[Any],
        fields: Selection,
        options: TableOptions,
        files: Sequence[IpcFile],
    ) -> None:
        super().__init__(paths, groups, schemas, fields, options)
        self._files = tuple(files)
        self._maps = [PerProcess(partial(_MappedFile, file), _MappedFile.close) for file in files]

    def batches(self, group: Group, names: Iterable[str]) -> Iterator[Any]:
        """Yield a record batch."""
        nbytes, limit = self._files[group.file].batches[group.number].unpacked_nbytes, self._options.max_group_nbytes
        if nbytes is not None and nbytes > limit:
            raise SourceError(
                f"its batch has {nbytes} bytes unpacked, all of which are held to read a row: write the file with "
                f"smaller ones, or without compression, or raise max_group_nbytes, which is {limit}"
            )
        there = self.leaves(self._schemas[group.file])
        columns = {leaf.path[0] for name in names if not isinstance(leaf := there[name], str)}
        batch = self._maps[group.file].get().batch(group.number, columns)
        for number, name in enumerate(batch.schema.names):
            if name in columns:
                column = batch.column(number)
                column.validate(full="_view" in str(column.type))  # columns.py checks the other types
        yield batch

    def offset(self, group: Group) -> int:
        """Return the byte at which a batch's message begins."""
        return self._files[group.file].batches[group.number].begin

    def cost(self, batch: Any) -> int:
        """Return the bytes that keeping a batch costs: a view of a map costs little."""
        nbytes: int = batch.nbytes
        is_packed = any(file.is_packed for file in self._files)
        return nbytes if is_packed else min(nbytes, _VIEW_NBYTES * batch.num_columns)

    def close(self) -> None:
        """Let go of what this process keeps; maps go when no sample is a view of them any more."""
        super().close()
        for mapped in self._maps:
            mapped.close()


class _MappedFile:
    """A file in this process's memory."""

    def __init__(self, file: IpcFile) -> None:
        self._pa = need("pyarrow", "parquet")
        self._file = file
        self._threads = threading.local()
        self._whole: list[Any] | None = None
        self._lock = threading.Lock()
        with translate_errors(file.path), self._pa.memory_map(file.path) as mapped:
            self._buffer = mapped.read_buffer()
        if file.batches and file.batches[-1].end > self._buffer.size:
            raise SourceError(f"{file.path} is shorter than it was when it was opened")

    def close(self) -> None:
        self._threads = threading.local()
        self._whole = None
        self._buffer = None

    def batch(self, number: int, columns: set[str]) -> Any:
        """Return a record batch with these columns, and perhaps others."""
        if not self._file.is_stream:
            return self._reader(columns).get_batch(number)
        if self._file.is_read_whole:
            return self._all_batches()[number]
        message = self._file.batches[number]
        return self._pa.ipc.read_record_batch(
            self._buffer.slice(message.begin, message.end - message.begin), self._file.schema
        )

    def _reader(self, columns: set[str]) -> Any:
        """Return this thread's reader: pyarrow's is not thread-safe, as it caches what it reads."""
        readers = self._threads.__dict__.setdefault("readers", {})
        wanted: list[int] = []  # [] is all columns: with a selection Arrow copies what else are views of the map
        if self._file.is_packed:
            wanted = [number for number, name in enumerate(self._file.schema.names) if name in columns]
        reader = readers.get(tuple(wanted))
        if reader is None:
            options = self._pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
            reader = readers[tuple(wanted)] = self._pa.ipc.open_file(self._buffer, options=options)
        if reader.num_record_batches != len(self._file.batches):
            raise SourceError("its footer lists other batches than its messages")
        return reader

    def _all_batches(self) -> list[Any]:
        """Return all batches: a stream may replace its dictionaries between them, and only its reader swaps bytes."""
        with self._lock:
            if self._whole is None:
                self._whole = list(self._pa.ipc.open_stream(self._buffer))
            return self._whole


class ArrowWriter(TableWriter):
    """Writes samples to a new Arrow IPC file.

    Args:
        path: of the file.
        schema: of the samples.
        compression: none, lz4 or zstd; without it, samples are read as views of the file.
        layout: of arrays: "tensors" (as other programs know them), or "raw".

    Raises:
        SourceError: the file cannot be written, or samples of this schema cannot.
    """

    def __init__(self, path: str, schema: Schema, *, compression: str = "none", layout: Layout = "tensors") -> None:
        arrow = arrow_schema(schema, layout, path)
        super().__init__(path, schema, arrow, layout, _sink(path, arrow, compression))


def concat_files(parts: Sequence[str], path: str) -> None:
    """Make one file of several of `ArrowWriter`, in their order: bytes are copied, or compressed again.

    Raises:
        SourceError: one cannot be read, or `path` cannot be written.
    """
    pa = need("pyarrow", "parquet")
    with translate_errors(path, "parts cannot be concatenated"):
        files = [scan_file(part) for part in parts]
        is_compressed = any(batch.unpacked_nbytes is not None for file in files for batch in file.batches)
        with _sink(path, files[0].schema, "zstd" if is_compressed else "none") as sink:
            for part in parts:
                with pa.memory_map(part) as mapped:
                    reader = pa.ipc.open_file(mapped)
                    for number in range(reader.num_record_batches):
                        sink.write_batch(reader.get_batch(number))


def _sink(path: str, schema: Any, compression: str) -> Any:
    pa = need("pyarrow", "parquet")
    with translate_errors(path, "it cannot be written"):
        options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression, use_threads=False)
        return pa.ipc.new_file(path, schema, options=options)
