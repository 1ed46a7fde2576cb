"""What a record batch of Arrow IPC unpacks to, as its message says.

Arrow takes memory for a buffer as its first 8 bytes state (int64, -1 where the buffer is stored as it is), before it
decompresses. So the sum of these is what a batch needs. The metadata are a flatbuffer (Message.fbs of Arrow's format):

    Message      1 type of the header | 2 header | 4 custom metadata
    header       a RecordBatch, or a DictionaryBatch whose field 1 is one
    RecordBatch  2 buffers: pairs of int64, offset in the body and bytes | 3 compression
    Footer       1 schema, whose field 0 is not 0 for the other byte order | 2, 3 blocks of dictionaries and of batches:
                 int64 place, int32 bytes of the metadata, 4 unused bytes, int64 bytes of the body

A table begins with the int32 distance back to its vtable: u16 size, u16 size of the table, u16 place of each field, 0
for one that is left out.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from penstock.core.errors import SourceError

_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
_OLD_COMPRESSION = b"ARROW:experimental_compression"
"""How Arrow before 1.0 said that a batch is compressed: in custom metadata."""


def unpacked_nbytes(message: Any) -> int | None:
    """Return what a batch or a dictionary unpacks to, of which pyarrow has the message; None if it is not compressed.

    Of each buffer 8 bytes are read.

    Raises:
        SourceError: it is damaged.

    >>> import pyarrow as pa
    >>> batch = pa.record_batch([pa.array(range(1000))], names=["x"])
    >>> sink = pa.BufferOutputStream()
    >>> with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
    ...     stream.write_batch(batch)
    >>> _, packed = pa.ipc.MessageReader.open_stream(sink.getvalue())
    >>> unpacked_nbytes(packed), unpacked_nbytes(pa.ipc.read_message(batch.serialize()))
    (8000, None)
    """
    metadata = memoryview(message.metadata)
    try:
        root = _Table.root(metadata)
        kind, header = root.int8(1), root.table(2)
        if header is not None and kind == _DICTIONARY_BATCH:
            header = header.table(1)
        if header is None or kind not in (_RECORD_BATCH, _DICTIONARY_BATCH):
            raise SourceError("it holds a message that is neither a batch nor a dictionary")
        if not header.has(3) and not (root.has(4) and _OLD_COMPRESSION in bytes(metadata)):
            return None
        body = memoryview(message.body)
        return sum(_unpacked(body, offset, length) for offset, length in header.pairs(2).tolist())
    except (struct.error, ValueError, IndexError) as error:
        raise SourceError(f"its metadata are damaged: {error}") from error


def _unpacked(body: memoryview, offset: int, length: int) -> int:
    if not length:
        return 0
    if not 0 <= offset <= offset + length <= len(body):
        raise SourceError(f"a buffer of {length} bytes at {offset} lies outside of its body of {len(body)}")
    stated: int = struct.unpack_from("<q", body, offset)[0]
    if stated < -1:
        raise SourceError(f"a buffer states {stated} bytes")
    return length if stated == -1 else stated


def footer_blocks(footer: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]], bool]:
    """Return where the messages of dictionaries and of batches lie, as a file's footer says, and if bytes are swapped.

    Raises:
        SourceError: it is damaged.
    """
    try:
        root = _Table.root(memoryview(footer))
        schema = root.table(1)
        return root.blocks(2), root.blocks(3), schema is not None and schema.int8(0) != 0
    except (struct.error, ValueError, IndexError) as error:
        raise SourceError(f"its footer is damaged: {error}") from error


class _Table:
    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self._at = at
        self._fields = at - struct.unpack_from("<i", data, at)[0]
        self._size = struct.unpack_from("<H", data, self._fields)[0]

    @classmethod
    def root(cls, data: memoryview) -> _Table:
        return cls(data, struct.unpack_from("<I", data, 0)[0])

    def _place(self, number: int) -> int:
        """Return where a field is; 0 if it is left out."""
        entry = 4 + 2 * number
        if entry + 2 > self._size:
            return 0
        place: int = struct.unpack_from("<H", self._data, self._fields + entry)[0]
        return self._at + place if place else 0

    def has(self, number: int) -> bool:
        return bool(self._place(number))

    def int8(self, number: int) -> int:
        place = self._place(number)
        return self._data[place] if place else 0

    def table(self, number: int) -> _Table | None:
        place = self._place(number)
        return _Table(self._data, place + struct.unpack_from("<I", self._data, place)[0]) if place else None

    def pairs(self, number: int) -> np.ndarray:
        """Return a vector of structs of two int64: int64[n, 2]."""
        return self._words(number, 2)

    def blocks(self, number: int) -> list[tuple[int, int]]:
        """Return where messages begin and end: of structs of their place, the size of their metadata and their body."""
        words = self._words(number, 3)
        return [(begin, begin + (size & 0xFFFFFFFF) + body) for begin, size, body in words.tolist()]

    def _words(self, number: int, width: int) -> np.ndarray:
        place = self._place(number)
        if not place:
            return np.zeros((0, width), np.int64)
        place += struct.unpack_from("<I", self._data, place)[0]
        (count,) = struct.unpack_from("<I", self._data, place)
        return np.frombuffer(self._data, "<i8", width * count, place + 4).reshape(-1, width)
