"""The frames of a TFRecord file: records, one after another.

Each is, little-endian:

    8 bytes     length of the data
    4 bytes     masked CRC-32C of those 8 bytes
    length      data
    4 bytes     masked CRC-32C of the data

A checksum is masked as ((crc >> 15) | (crc << 17)) + 0xA282EAD8, modulo 2^32. gzip may pack the whole file, or parts of
it one after another. https://www.tensorflow.org/tutorials/load_data/tfrecord
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from penstock.core.errors import RecordError
from penstock.data.optional import need
from penstock.data.storage.sequential_reader import SequentialReader

HEADER = struct.Struct("<QI")
FOOTER = struct.Struct("<I")
FRAME_NBYTES = HEADER.size + FOOTER.size
"""What a record takes beyond its data."""


def read_frames(
    pieces: SequentialReader, first: int, step: int, checksum: Callable[[bytes], int] | None, most: int
) -> Iterator[tuple[int, int, bytes | RecordError]]:
    """Yield the number, the offset and the data of every step-th record, or what is wrong with it.

    Args:
        pieces: the file.
        first: the first record's number.
        step: how many there are to the next one.
        checksum: see `load_checksum`; None skips the check.
        most: a record of more bytes is broken.

    Raises:
        RecordError: the file is truncated, or a length is corrupt.
    """
    path, wanted, number = pieces.path, first, -1
    while True:
        number += 1
        pieces.key, offset = number, pieces.offset
        header = pieces.take(HEADER.size)
        if not header:
            return
        if len(header) < HEADER.size:
            raise RecordError(path, offset, number, f"its header has {len(header)} bytes of {HEADER.size}")
        length, masked = HEADER.unpack(header)
        if checksum is not None and checksum(header[:8]) != masked:
            raise RecordError(path, offset, number, "the checksum of its length is wrong, and so the rest is lost")
        if number != wanted or length > most:
            rest = length + FOOTER.size
            skipped = pieces.skip(rest)
            if skipped < rest:
                raise RecordError(path, offset, number, too_short_message(length, HEADER.size + skipped))
            if number == wanted:
                wanted += step
                yield number, offset, RecordError(path, offset, number, f"{length} bytes; {most} are the most")
            continue
        wanted += step
        record, footer = pieces.take(length), pieces.take(FOOTER.size)
        if len(footer) < FOOTER.size:
            there = HEADER.size + len(record) + len(footer)
            raise RecordError(path, offset, number, too_short_message(length, there))
        if checksum is not None and checksum(record) != FOOTER.unpack(footer)[0]:
            yield number, offset, RecordError(path, offset, number, "the checksum of its data is wrong")
            continue
        yield number, offset, record


def too_short_message(length: int, there: int) -> str:
    """Return the message for a record of `length` bytes that the file's end cuts off.

    >>> too_short_message(568, 580)
    'it takes 584 bytes, 568 of data and 16 of its frame, and the file has 580 of them'
    """
    frame = length + FRAME_NBYTES
    return f"it takes {frame} bytes, {length} of data and {FRAME_NBYTES} of its frame, and the file has {there} of them"


def load_checksum() -> Callable[[bytes], int]:
    """Return the function that makes a masked CRC-32C.

    Raises:
        ExtraError: google-crc32c is not installed.

    >>> hex(load_checksum()(b"penstock"))
    '0x793d5367'
    """
    crc32c: Callable[[bytes], int] = need("google_crc32c", "tfrecord").value

    def masked(data: bytes) -> int:
        crc = crc32c(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    return masked
