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

import os
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.errors import RecordError, SourceError
from penstock.data.optional import need
from penstock.data.storage.sequential_reader import SequentialReader

HEADER = struct.Struct("<QI")
FOOTER = struct.Struct("<I")
FRAME_NBYTES = HEADER.size + FOOTER.size
"""What a record takes beyond its data."""

_MASK = 0xA282EAD8
_FEWEST_ALIKE = 8
_MOST_ONE_BY_ONE = 1023
_BLOCK_NBYTES = 4096
_LONG = 1 << 40
_PACKED = "; files that ZLIB packed are not read, and with index=True none that gzip packed: write them unpacked"


@dataclass(frozen=True, slots=True)
class Checksum:
    """The masked CRC-32C of bytes.

    >>> hex(load_checksum()(b"penstock")), load_checksum().of_each([b"penstock"]) == 0x793D5367
    ('0x793d5367', array([ True]))
    """

    crc32c: Callable[[bytes], int]

    def __call__(self, data: bytes) -> int:
        """Return that of some bytes."""
        crc = self.crc32c(data)
        return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF

    def of_each(self, records: Sequence[bytes]) -> np.ndarray:
        """Return those of several: uint32[records]."""
        crc = np.fromiter(map(self.crc32c, records), np.uint32, len(records))
        return (crc >> 15 | crc << 17) + np.uint32(_MASK)


def load_checksum() -> Checksum:
    """Return what makes checksums.

    Raises:
        ExtraError: google-crc32c is not installed.
    """
    return Checksum(need("google_crc32c", "tfrecord").value)


def check_header(path: str, offset: int, number: int, header: bytes, checksum: Checksum | None) -> int:
    """Return the bytes of a record, given its header.

    Raises:
        RecordError: it is cut off, or its checksum is wrong.
    """
    if len(header) < HEADER.size:
        raise RecordError(path, offset, number, f"its header has {len(header)} bytes of {HEADER.size}")
    length, masked = HEADER.unpack(header)
    if checksum is not None and checksum(header[:8]) != masked:
        reason = f"the checksum of its length is wrong, and so the rest is lost{_PACKED}"
        raise RecordError(path, offset, number, reason)
    return int(length)


def too_long_message(length: int, most: int) -> str:
    """Return the message for a record of more bytes than are read."""
    return f"{length} bytes; {most} are the most (max_record_nbytes)"


def too_short_message(length: int, there: int) -> str:
    """Return the message for a record of `length` bytes that the file's end cuts off.

    >>> too_short_message(568, 580)
    'it takes 584 bytes, 568 of data and 16 of its frame, and the file has 580 of them'
    """
    frame = length + FRAME_NBYTES
    words = f"it takes {frame} bytes, {length} of data and {FRAME_NBYTES} of its frame, and the file has {there} of"
    return f"{words} them{_PACKED if length > _LONG else ''}"


def scan_offsets(path: str, checksum: Checksum | None) -> np.ndarray:
    """Return where each record of a local file begins, and the end of the last one, int64[n + 1].

    Reads nothing but their headers, whose checksums it compares if it is given what makes them; not of a gzip file.

    Raises:
        RecordError: the file is truncated, or a length is corrupt.
        SourceError: it cannot be read.
    """
    begins = array("q", [0])
    try:
        with open(path, "rb", buffering=0) as file:
            total = os.fstat(file.fileno()).st_size
            block, begin, at = b"", 0, 0
            while at < total:
                if at + HEADER.size > begin + len(block):
                    block, begin = os.pread(file.fileno(), _BLOCK_NBYTES, at), at
                header = block[at - begin : at - begin + HEADER.size]
                length = check_header(path, at, len(begins) - 1, header, checksum)
                if FRAME_NBYTES + length > total - at:
                    raise RecordError(path, at, len(begins) - 1, too_short_message(length, total - at))
                at += FRAME_NBYTES + length
                begins.append(at)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
    return np.frombuffer(begins, np.int64).copy()


# ── in order ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class AlikeRecords:
    """Records of one length that follow each other, or every n-th of them. They are intact."""

    data: list[bytes]
    rows: np.ndarray
    """The same, uint8[records, bytes]: a view of what was read."""
    first: int
    """The number of the first."""
    offset: int
    """Where its frame begins."""
    step: int
    """From the number of one to that of the next."""

    def place(self, at: int) -> tuple[int, int]:
        """Return the number of one of them, and where its frame begins."""
        return self.first + at * self.step, self.offset + at * self.step * (self.rows.shape[1] + FRAME_NBYTES)


def read_frames(
    pieces: SequentialReader, first: int, step: int, checksum: Checksum | None, most: int
) -> Iterator[tuple[int, int, bytes | RecordError] | AlikeRecords]:
    """Yield the number, the offset and the data of every step-th record, or what is wrong with it; or many at once.

    Args:
        pieces: the file.
        first: the first record's number.
        step: how many there are to the next one.
        checksum: see `load_checksum`; None skips the check.
        most: a record of more bytes is broken.

    Raises:
        RecordError: the file is truncated, or a length is corrupt.
    """
    wanted, number = first, 0
    wait = one_by_one = 0  # records until it looks for many again: seldom, where there mostly are none
    while True:
        pieces.key = number
        frames = _alike_ahead(pieces, most) if not wait else None
        if frames is not None:
            one_by_one = 0
            alike = _take_alike(pieces, frames, number, wanted, step, checksum)
            if alike is not None:
                number += len(frames)
                wanted += step * len(alike.data)
                if alike.data:
                    yield alike
                continue
            wait = len(frames)
        elif not wait:
            wait = one_by_one = min(2 * one_by_one + 1, _MOST_ONE_BY_ONE)
        wait -= 1
        offset = pieces.offset
        record = _read_frame(pieces, number, checksum, most, skips=number != wanted)
        if record is None:
            return
        if number == wanted:
            wanted += step
            yield number, offset, record
        number += 1


def _read_frame(
    pieces: SequentialReader, number: int, checksum: Checksum | None, most: int, *, skips: bool
) -> bytes | RecordError | None:
    """Return a record, or what is wrong with it; nothing of it if it is skipped, and None at the end of the file."""
    path, offset = pieces.path, pieces.offset
    header = pieces.take(HEADER.size)
    if not header:
        return None
    length = check_header(path, offset, number, header, checksum)
    if skips or length > most:
        rest = length + FOOTER.size
        skipped = pieces.skip(rest)
        if skipped < rest:
            raise RecordError(path, offset, number, too_short_message(length, HEADER.size + skipped))
        return b"" if skips else RecordError(path, offset, number, too_long_message(length, most))
    record, footer = pieces.take(length), pieces.take(FOOTER.size)
    if len(footer) < FOOTER.size:
        there = HEADER.size + len(record) + len(footer)
        raise RecordError(path, offset, number, too_short_message(length, there))
    if checksum is not None and checksum(record) != FOOTER.unpack(footer)[0]:
        return RecordError(path, offset, number, "the checksum of its data is wrong")
    return record


def _alike_ahead(pieces: SequentialReader, most: int) -> np.ndarray | None:
    """Return the frames of one length that come next and have been read, uint8[frames, bytes]; None if they are few."""
    buffer, at = pieces.ahead()
    there = len(buffer) - at
    if there < _FEWEST_ALIKE * FRAME_NBYTES:
        return None
    nbytes = HEADER.unpack_from(buffer, at)[0] + FRAME_NBYTES
    if there // nbytes < _FEWEST_ALIKE or nbytes - FRAME_NBYTES > most:
        return None
    frames = np.frombuffer(buffer, np.uint8, there // nbytes * nbytes, at).reshape(-1, nbytes)
    headers = np.ascontiguousarray(frames[:, : HEADER.size].T)  # along frames, a comparison takes a third
    others = np.flatnonzero((headers != headers[:, :1]).any(axis=0))
    frames = frames[: others[0]] if len(others) else frames
    return frames if len(frames) >= _FEWEST_ALIKE else None


def _take_alike(
    pieces: SequentialReader, frames: np.ndarray, number: int, wanted: int, step: int, checksum: Checksum | None
) -> AlikeRecords | None:
    """Take the frames that come next, from record `number` on, and return the wanted ones; None if one is broken."""
    (buffer, at), (count, nbytes), start = pieces.ahead(), frames.shape, wanted - number
    begins = range(at + start * nbytes + HEADER.size, at + count * nbytes, step * nbytes)
    data = [buffer[begin : begin + nbytes - FRAME_NBYTES] for begin in begins]
    own = frames[start::step]
    if checksum is not None:
        if checksum(buffer[at : at + 8]) != HEADER.unpack_from(buffer, at)[1]:
            return None
        if (checksum.of_each(data) != own[:, -FOOTER.size :].view("<u4")[:, 0]).any():
            return None
    offset = pieces.offset + start * nbytes
    pieces.skip(count * nbytes)
    return AlikeRecords(data, own[:, HEADER.size : -FOOTER.size], number + start, offset, step)
