"""Arrow IPC: files (Feather version 2), and streams as Hugging Face's datasets keeps them; record batches are groups.

A file is mapped into memory. Where its batches lie, and how many rows each has, is taken from the messages when it is
opened: bodies stay unread, but must lie within the file. Samples of batches that are not compressed are views of the
map. types.py has the types that are read and how arrays are written ("tensors" by default). A stream with dictionaries,
which it may replace, is read whole. Files of the other byte order are refused.

Nobody may write or shorten a file while it is mapped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.core.errors import SourceError
from penstock.core.per_process import PerProcess
from penstock.data.formats.arrow.ipc_message import footer_blocks, unpacked_nbytes
from penstock.data.formats.arrow.table import TableSource, translate_arrow_errors
from penstock.data.formats.arrow.types import Layout
from penstock.data.formats.arrow.writer import TableWriter
from penstock.data.optional import need
from penstock.data.schema import Schema
from penstock.data.storage.storage import Storage

_MAGIC = b"ARROW1"
_VIEW_NBYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class IpcFile:
    """What is known of a file. Can be pickled."""

    path: str
    nbytes: int
    is_stream: bool
    schema: Any
    rows: list[int]
    """Of each record batch."""
    spans: list[tuple[int, int]]
    """The bytes of its message."""
    has_dictionaries: bool
    is_packed: bool
    """Whether its first batch is compressed."""
    dictionary_nbytes: int = 0
    """What its compressed dictionaries unpack to: all of them are read with the first batch."""


def scan_file(path: str) -> IpcFile:
    """Return where the batches of a file or a stream lie.

    Raises:
        SourceError: it is damaged, neither, or of the other byte order.
    """
    with translate_arrow_errors(path):
        data = _map(path)
        if data.size < len(_MAGIC):
            raise SourceError(f"{path} is no Arrow file: it has {data.size} bytes")
        magic = data.slice(0, len(_MAGIC)).to_pybytes()
        if magic.startswith(b"FEA1"):
            raise SourceError(f"{path} is a Feather file of version 1, which is not read; write version 2 of it")
        return _scan_by_footer(path, data) if magic == _MAGIC else _scan_stream(path, data)


def _scan_stream(path: str, data: Any) -> IpcFile:
    pa = need("pyarrow", "parquet")
    messages, no_columns = pa.BufferReader(data), pa.schema([])
    schema = pa.ipc.read_schema(messages)
    if schema != pa.ipc.open_stream(data).schema:  # which has it in this machine's
        raise _swapped(path)
    messages.seek(0)
    rows, spans, dictionary_nbytes = list[int](), list[tuple[int, int]](), 0
    is_packed = has_dictionaries = False
    begin = 0
    for message in pa.ipc.MessageReader.open_stream(messages):
        end = messages.tell()
        if message.type == "record batch":
            is_packed = is_packed if rows else unpacked_nbytes(message) is not None
            rows.append(pa.ipc.read_record_batch(message, no_columns).num_rows)
            spans.append((begin, end))
        elif message.type == "dictionary":
            has_dictionaries = True
            dictionary_nbytes += unpacked_nbytes(message) or 0
        begin = end
    return IpcFile(path, data.size, True, schema, rows, spans, has_dictionaries, is_packed, dictionary_nbytes)


def _scan_by_footer(path: str, data: Any) -> IpcFile:
    """Return where the batches of a file lie, as its footer says: there pyarrow reads them, whatever lies elsewhere."""
    pa = need("pyarrow", "parquet")
    reader, no_columns = pa.ipc.open_file(data), pa.schema([])
    end = data.size - len(_MAGIC) - 4
    nbytes = int.from_bytes(data.slice(end, 4).to_pybytes(), "little")
    dictionaries, spans, is_swapped = footer_blocks(data.slice(end - nbytes, nbytes))
    if is_swapped:
        raise _swapped(path)
    is_packed = bool(spans) and unpacked_nbytes(_message(data, *spans[0])) is not None
    rows = [pa.ipc.read_record_batch(_message(data, *span), no_columns).num_rows for span in spans]
    unpacked = sum(unpacked_nbytes(_message(data, *span)) or 0 for span in dictionaries)
    return IpcFile(path, data.size, False, reader.schema, rows, spans, bool(dictionaries), is_packed, unpacked)


def _swapped(path: str) -> SourceError:
    return SourceError(f"{path} is of the other byte order (big-endian), which is not read; write it anew with pyarrow")


def _message(data: Any, begin: int, end: int) -> Any:
    """Return a message, whose body is not read; raise SourceError if it lies outside of the file."""
    if not 0 <= begin <= end <= data.size:
        raise SourceError(f"a batch lies at {begin} to {end}, and the file has {data.size} bytes")
    try:
        return need("pyarrow", "parquet").ipc.read_message(data.slice(begin, end - begin))
    except EOFError:
        raise SourceError(f"no message begins at byte {begin}") from None


def _map(path: str) -> Any:
    """Return a file as a buffer: pyarrow reads messages from one in half the time that it takes from its map."""
    with need("pyarrow", "parquet").memory_map(path) as mapped:
        return mapped.read_buffer()


class ArrowSource(TableSource):
    """Rows of Arrow files; see the module."""

    def scan(self, paths: Sequence[str], storage: Storage, max_record_nbytes: int) -> Iterable[tuple[list[int], Any]]:
        """Return the rows of each batch of a file, and its schema, for each file."""
        self._ipc = [scan_file(storage.local(path)) for path in paths]
        self._maps = [
            PerProcess(partial(_MappedFile, file, max_record_nbytes), _MappedFile.close) for file in self._ipc
        ]
        return [(file.rows, file.schema) for file in self._ipc]

    def batches(self, file: int, group: int, columns: Sequence[tuple[str, ...]]) -> Iterator[tuple[Any, int]]:
        """Yield a record batch, and the bytes that it costs to keep: a view of a map costs little."""
        batch = self._maps[file].get().batch(group, {path[0] for path in columns})
        is_packed = self._ipc[file].is_packed
        yield batch, batch.get_total_buffer_size() if is_packed else _VIEW_NBYTES * batch.num_columns

    def offset(self, file: int, group: int) -> int:
        """Return the byte at which a batch's message begins."""
        return self._ipc[file].spans[group][0]

    def close(self) -> None:
        """Let go of what this process keeps; maps go when no sample is a view of them any more."""
        super().close()
        for mapped in self._maps:
            mapped.close()


class _MappedFile:
    """A file in this process's memory.

    Args:
        file: which.
        most_nbytes: that a batch, and what is unpacked with it, may unpack to.
    """

    def __init__(self, file: IpcFile, most_nbytes: int) -> None:
        self._file = file
        self._most_nbytes = most_nbytes
        self._threads = threading.local()
        self._whole: list[Any] | None = None
        self._lock = threading.Lock()
        with translate_arrow_errors(file.path):
            self._data = _map(file.path)
        if self._data.size < file.nbytes:  # reading beyond its end would be fatal
            raise SourceError(f"{file.path} is shorter than it was when it was opened")

    def close(self) -> None:
        self._threads = threading.local()
        self._whole = self._data = None

    def batch(self, number: int, columns: set[str]) -> Any:
        """Return a record batch with these columns, and perhaps others."""
        file = self._file
        if file.is_stream and file.has_dictionaries:
            return self._all_batches()[number]
        self._check([file.spans[number]])
        if file.has_dictionaries or (file.is_packed and not file.is_stream):
            return self._reader(columns).get_batch(number)
        begin, end = file.spans[number]
        return need("pyarrow", "parquet").ipc.read_record_batch(self._data.slice(begin, end - begin), file.schema)

    def _check(self, spans: Iterable[tuple[int, int]]) -> None:
        """Raise SourceError if batches that are compressed, and their dictionaries, take too much memory."""
        nbytes = self._file.dictionary_nbytes
        for begin, end in spans:
            nbytes += unpacked_nbytes(_message(self._data, begin, end)) or 0
        if nbytes > self._most_nbytes:
            raise SourceError(
                f"its batch has {nbytes} bytes unpacked, all of which are held to read a row: write the file with "
                f"smaller ones, or raise max_record_nbytes, which is {self._most_nbytes}"
            )

    def _reader(self, columns: set[str]) -> Any:
        """Return this thread's reader: pyarrow's is not thread-safe, as it caches what it reads."""
        readers = self._threads.__dict__.setdefault("readers", {})
        wanted: tuple[int, ...] = ()  # all columns: with a selection Arrow copies what else are views of the map
        if self._file.is_packed:
            wanted = tuple(number for number, name in enumerate(self._file.schema.names) if name in columns)
        if wanted not in readers:
            ipc = need("pyarrow", "parquet").ipc
            options = ipc.IpcReadOptions(included_fields=[*wanted], use_threads=False)
            readers[wanted] = ipc.open_file(self._data, options=options)
        return readers[wanted]

    def _all_batches(self) -> list[Any]:
        with self._lock:
            if self._whole is None:
                self._check(self._file.spans)
                self._whole = [*need("pyarrow", "parquet").ipc.open_stream(self._data)]
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
        super().__init__(path, schema, layout, partial(_sink, path, compression=compression))


def _sink(path: str, schema: Any, compression: str) -> Any:
    pa = need("pyarrow", "parquet")
    with translate_arrow_errors(path, "it cannot be written"):
        options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression, use_threads=False)
        return pa.ipc.new_file(path, schema, options=options)
