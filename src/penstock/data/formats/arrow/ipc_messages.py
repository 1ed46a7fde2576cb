"""The messages of an Arrow IPC file or stream: where record batches lie, found without reading them.

    file      "ARROW1", 2 bytes; messages as in a stream; a footer; int32 bytes of it; "ARROW1"
    stream    messages, and at the end 0xFFFFFFFF and int32 0, or nothing
    message   0xFFFFFFFF (missing before version 0.15), int32 bytes of metadata; metadata, a FlatBuffer; a body

pyarrow neither counts the rows of a batch without reading it, nor limits what a compressed one unpacks to.

Of the metadata, this is read (FlatBuffers: a table begins with an int32 back to its vtable, which holds uint16 places)

    Message          1 uint8 which header: 1 a Schema, 2 a DictionaryBatch, 3 a RecordBatch; 2 the header; 3 int64 bytes
                     of the body
    Schema           0 int16 1 where numbers of the bodies are big-endian
    DictionaryBatch  1 a RecordBatch
    RecordBatch      0 int64 rows; 2 a vector of buffers, int64 place and bytes; 3 compression, a table, or nothing

A compressed buffer begins with an int64: the bytes that it unpacks to, or -1 where it is not compressed after all.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import SourceError
from penstock.data.formats.arrow.table_source import translate_errors
from penstock.data.optional import need

Unpack = Callable[[bytes, int], tuple[int, ...]]

_MAGIC = b"ARROW1"
_BYTE, _SHORT, _UNSHORT = (struct.Struct(code).unpack_from for code in ("<B", "<h", "<H"))
_INT, _UNINT, _LONG, _SPAN = (struct.Struct(code).unpack_from for code in ("<i", "<I", "<q", "<qq"))
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Message:
    """A schema, a batch or a dictionary, and where its message lies."""

    kind: int
    begin: int
    end: int
    rows: int
    """Of a schema, 1 where the bodies are big-endian."""
    unpacked_nbytes: int | None
    """Of its body; None where that is not compressed."""


@dataclass(frozen=True, slots=True)
class IpcFile:
    """The batches of one file. Can be pickled."""

    path: str
    is_stream: bool
    schema: Any
    batches: tuple[Message, ...]
    is_read_whole: bool
    """Whether it is a stream of which no batch can be read alone: it has dictionaries, or the other byte order."""
    held_nbytes: int
    """What has to be in memory to read any batch: dictionaries, or all batches."""
    is_packed: bool
    """Whether batches are compressed, or of the other byte order: what is read of them is a copy."""

    def first_rows(self) -> list[int]:
        """Return the first row of each batch."""
        first, found = 0, []
        for batch in self.batches:
            found.append(first)
            first += batch.rows
        return found


def scan_file(path: str) -> IpcFile:
    """Return the batches of a file or a stream.

    Raises:
        SourceError: it is damaged, or neither.
    """
    pa = need("pyarrow", "parquet")
    with translate_errors(path):
        nbytes = os.path.getsize(path)
        if nbytes < 8:
            raise SourceError(f"{path}: {nbytes} bytes are no Arrow data")
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            is_stream = data[:6] != _MAGIC
            try:
                messages = list(_messages(path, data, 0 if is_stream else 8))
            except struct.error as error:
                raise SourceError(f"{path}: its messages' metadata are damaged: {error}") from error
        with pa.memory_map(path) as mapped:
            reader = pa.ipc.open_stream(mapped) if is_stream else pa.ipc.open_file(mapped)
            schema = reader.schema
    batches = tuple(message for message in messages if message.kind == _BATCH)
    dictionaries = [message for message in messages if message.kind == _DICTIONARY]
    is_big = any(message.rows for message in messages if message.kind == _SCHEMA)
    is_swapped = is_big != (sys.byteorder == "big")
    is_packed = is_swapped or any(message.unpacked_nbytes is not None for message in messages)
    is_read_whole = is_stream and (is_swapped or bool(dictionaries))
    held = [*dictionaries, *batches] if is_read_whole else dictionaries
    held_nbytes = sum(one.unpacked_nbytes or (one.end - one.begin if is_swapped else 0) for one in held)
    return IpcFile(path, is_stream, schema, batches, is_read_whole, held_nbytes, is_packed)


def _messages(path: str, data: mmap.mmap, at: int) -> Iterator[Message]:
    """Yield the batches and dictionaries of a stream.

    Raises:
        SourceError: one does not end in the file.
    """
    while at + 4 <= len(data):
        begin = at
        (nbytes,) = _INT(data, at)
        at += 4
        if nbytes == -1 and at + 4 <= len(data):
            (nbytes,) = _INT(data, at)
            at += 4
        if nbytes == 0:
            return
        if not 0 < nbytes <= len(data) - at:
            raise SourceError(
                f"{path}: the message at byte {begin} has {nbytes} bytes of metadata: truncated or corrupt"
            )
        metadata, at = data[at : at + nbytes], at + nbytes
        kind, table, body_nbytes = _header(metadata)
        if not 0 <= body_nbytes <= len(data) - at:
            raise SourceError(f"{path}: the message at byte {begin} has {body_nbytes} bytes: truncated or corrupt")
        if kind == _SCHEMA:
            yield Message(kind, begin, at, _field(metadata, _SHORT, table, 0), None)
        if kind in (_DICTIONARY, _BATCH):
            if kind == _DICTIONARY:
                table = _table(metadata, _slot(metadata, table, 1))
            unpacked = _unpacked_nbytes(metadata, table, data, at, body_nbytes)
            yield Message(kind, begin, at + body_nbytes, _field(metadata, _LONG, table, 0), unpacked)
        at += body_nbytes


def _header(metadata: bytes) -> tuple[int, int, int]:
    """Return a message's kind, where its header lies in the metadata, and the bytes of its body."""
    root = _table(metadata, 0)
    place = _slot(metadata, root, 2)
    header = _table(metadata, place) if place else 0
    return _field(metadata, _BYTE, root, 1), header, _field(metadata, _LONG, root, 3)


def _unpacked_nbytes(metadata: bytes, table: int, data: mmap.mmap, body: int, body_nbytes: int) -> int | None:
    """Return how many bytes a batch's buffers unpack to; None if they are not compressed."""
    if not _slot(metadata, table, 3):
        return None
    place = _slot(metadata, table, 2)
    vector = _table(metadata, place) if place else 0
    total = 0
    for number in range(_number(metadata, _UNINT, vector) if vector else 0):
        offset, nbytes = _SPAN(metadata, vector + 4 + 16 * number)
        if nbytes >= 8 and 0 <= offset <= body_nbytes - 8:
            (unpacked,) = _LONG(data, body + offset)
            total += nbytes if unpacked == -1 else max(0, unpacked)
    return total


def _table(data: bytes, place: int) -> int:
    """Return the place that the offset at `place` points to."""
    return place + _number(data, _UNINT, place)


def _slot(data: bytes, table: int, number: int) -> int:
    """Return where field `number` of a FlatBuffer's table lies; 0 where the table does not have it."""
    vtable = table - _number(data, _INT, table)
    within = 4 + 2 * number
    if vtable < 0 or within >= _UNSHORT(data, vtable)[0]:
        return 0
    offset = _number(data, _UNSHORT, vtable + within)
    return table + offset if offset else 0


def _field(data: bytes, unpack: Unpack, table: int, number: int) -> int:
    """Return the number that field `number` of a table holds; 0, its default, where the table does not have it."""
    place = _slot(data, table, number)
    return _number(data, unpack, place) if place else 0


def _number(data: bytes, unpack: Unpack, place: int) -> int:
    if place < 0:
        raise struct.error("an offset before the beginning")
    return int(unpack(data, place)[0])
