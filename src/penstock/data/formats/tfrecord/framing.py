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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.errors import RecordError
from penstock.data.optional import need
from penstock.data.storage.sequential_reader import SequentialReader

HEADER = struct.Struct("<QI")
FOOTER = struct.Struct("<I")
FRAME_NBYTES = HEADER.size + FOOTER.size
"""What a record takes beyond its data."""

_MASK = 0xA282EAD8

_FEWEST_ALIKE = 8
_MOST_ONE_BY_ONE = 1023


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
    wanted, number, looks = first, 0, _LookAhead(checksum, most)
    while True:
        pieces.key = number
        if (found := looks.alike(pieces, number, wanted, step)) is not None:
            count, alike = found
            number += count
            wanted += step * len(alike.data)
            if alike.data:
                yield alike
            continue
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
    if len(header) < HEADER.size:
        raise RecordError(path, offset, number, f"its header has {len(header)} bytes of {HEADER.size}")
    length, masked = HEADER.unpack(header)
    if checksum is not None and checksum(header[:8]) != masked:
        reason = f"the checksum of its length is wrong, and so the rest is lost{zlib_hint(length)}"
        raise RecordError(path, offset, number, reason)
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


class _LookAhead:
    """Finds records of one length among the bytes that have been read. Looks rarely where there mostly are none."""

    def __init__(self, checksum: Checksum | None, most: int) -> None:
        self._checksum, self._most = checksum, most
        self._wait = self._one_by_one = 0

    def alike(self, pieces: SequentialReader, number: int, wanted: int, step: int) -> tuple[int, AlikeRecords] | None:
        """Take records from `number` on, and return how many these are, and those that are wanted; None if few."""
        if self._wait:
            self._wait -= 1
            return None
        frames = self._frames(pieces)
        self._one_by_one = 0 if frames is not None else min(2 * self._one_by_one + 1, _MOST_ONE_BY_ONE)
        self._wait = self._one_by_one if frames is None else len(frames)
        if frames is None:
            return None
        (buffer, at), (count, nbytes), start = pieces.ahead(), frames.shape, wanted - number
        begins = range(at + start * nbytes + HEADER.size, at + count * nbytes, step * nbytes)
        data = [buffer[begin : begin + nbytes - FRAME_NBYTES] for begin in begins]
        own = frames[start::step]
        if self._checksum is not None:
            if self._checksum(buffer[at : at + 8]) != HEADER.unpack_from(buffer, at)[1]:
                return None
            if (self._checksum.of_each(data) != own[:, -FOOTER.size :].view("<u4")[:, 0]).any():
                return None
        self._wait = 0
        rows, offset = own[:, HEADER.size : -FOOTER.size], pieces.offset + start * nbytes
        pieces.skip(count * nbytes)
        return count, AlikeRecords(data, rows, number + start, offset, step)

    def _frames(self, pieces: SequentialReader) -> np.ndarray | None:
        """Return the frames that come next, uint8[frames, bytes]; None if those of one length are few."""
        buffer, at = pieces.ahead()
        there = len(buffer) - at
        if there < _FEWEST_ALIKE * FRAME_NBYTES:
            return None
        nbytes = HEADER.unpack_from(buffer, at)[0] + FRAME_NBYTES
        if there // nbytes < _FEWEST_ALIKE or nbytes - FRAME_NBYTES > self._most:
            return None
        frames = np.frombuffer(buffer, np.uint8, there // nbytes * nbytes, at).reshape(-1, nbytes)
        headers = np.ascontiguousarray(frames[:, : HEADER.size].T)  # along frames, a comparison takes a third
        others = np.flatnonzero((headers != headers[:, :1]).any(axis=0))
        frames = frames[: others[0]] if len(others) else frames
        return frames if len(frames) >= _FEWEST_ALIKE else None


def too_long_message(length: int, most: int) -> str:
    """Return the message for a record of more bytes than are read."""
    return f"{length} bytes; {most} are the most (max_record_nbytes)"


def too_short_message(length: int, there: int) -> str:
    """Return the message for a record of `length` bytes that the file's end cuts off.

    >>> too_short_message(568, 580)
    'it takes 584 bytes, 568 of data and 16 of its frame, and the file has 580 of them'
    """
    frame = length + FRAME_NBYTES
    words = (
        f"it takes {frame} bytes, {length} of data and {FRAME_NBYTES} of its frame, and the file has {there} of them"
    )
    return words + zlib_hint(length)


def zlib_hint(length: int) -> str:
    """Return what to say of a length that is rather the beginning of what TensorFlow's ZLIB packed; else "".

    >>> zlib_hint(0xE0606060E2E39C78)
    '; it seems that ZLIB packed the file, which is not read: write it with GZIP, or unpacked'
    >>> zlib_hint(0x9C78)
    ''
    """
    second, first = divmod(length & 0xFFFF, 256)
    if not length >> 32 or first != 0x78 or (first << 8 | second) % 31:  # RFC 1950
        return ""
    return "; it seems that ZLIB packed the file, which is not read: write it with GZIP, or unpacked"


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
