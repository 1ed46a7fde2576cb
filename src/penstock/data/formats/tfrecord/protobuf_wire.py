"""What the fast paths read of protobuf's wire format: a message is fields in any order, each a tag and a value.

The tag is a varint of `number << 3 | type`. By its type the value is a varint (0), 8 bytes (1), a varint of a length
and as many bytes (2), a group up to its end (3, 4), or 4 bytes (5). A varint has 7 bits in a byte, the lowest first,
and the highest bit of each byte but the last is set; a negative int64 is one of 10 bytes.
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import numpy as np

WORD = 1 << 64
_SUBMESSAGE = 0x0A  # field 1, with a length
_FLOAT: np.dtype = np.dtype("<f4")


class MalformedError(ValueError):
    """These bytes are no such message."""


def floats(data: bytes, at: int, end: int) -> np.ndarray:
    """Return packed floats: a float32 array, which cannot be written to.

    Raises:
        MalformedError: one ends in its middle.
    """
    if (end - at) % 4:
        raise MalformedError(f"{end - at} bytes of packed floats are not a multiple of 4")
    return np.frombuffer(data, _FLOAT, (end - at) // 4, at)


def int64_rows(packed: np.ndarray) -> np.ndarray | None:
    """Return packed integers of many messages; None where they do not lie at the same places.

    Args:
        packed: uint8[messages, bytes].

    Returns:
        int64[messages, integers].

    Raises:
        MalformedError: a varint is too long, or ends in its middle.
    """
    is_last = packed < 0x80
    if (is_last != is_last[0]).any():
        return None
    lasts = np.flatnonzero(is_last[0])
    if not len(lasts) or lasts[-1] != packed.shape[1] - 1:
        raise MalformedError("a varint ends in its middle")
    firsts = np.concatenate([[0], lasts[:-1] + 1])
    lengths = lasts - firsts + 1
    if lengths.max() > 10:
        raise MalformedError("a varint is longer than 10 bytes")
    found: np.ndarray = (packed[:, firsts] & 0x7F).astype(np.uint64)
    for number in range(1, int(lengths.max())):
        longer = np.flatnonzero(lengths > number)
        bits = (packed[:, firsts[longer] + number] & 0x7F).astype(np.uint64)
        found[:, longer] |= bits << np.uint64(7 * number)
    return found.view(np.int64)


def few_int64s(data: bytes) -> list[int]:
    """Return packed integers: where they are few, in less time than protobuf's first call takes.

    Raises:
        MalformedError: a varint is too long, or ends in its middle.

    >>> few_int64s(bytes([1, 0x80, 2]))
    [1, 256]
    """
    values = []
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        if byte >= 0x80:
            shift += 7
            continue
        if shift >= 63:
            if shift > 63:
                break
            value %= WORD
            value -= WORD if value >= WORD >> 1 else 0
        values.append(value)
        value = shift = 0
    if shift:
        raise MalformedError("a varint ends in its middle, or is longer than 10 bytes")
    return values


def varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return an integer of 64 bits without a sign, and where it ends.

    Raises:
        MalformedError: it is too long, or ends in its middle.
    """
    if at + 2 <= end and data[at + 1] < 0x80 <= data[at]:  # lengths of some hundred bytes: the most frequent
        return data[at] & 0x7F | data[at + 1] << 7, at + 2
    value = 0
    for number in range(10):
        if at >= end:
            raise MalformedError("a varint ends in its middle")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * number)
        if byte < 0x80:
            return value % WORD, at
    raise MalformedError("a varint is longer than 10 bytes")


def usual_span(record: bytes, at: int, end: int) -> tuple[int, int]:
    """Return where field 1 begins and ends.

    Raises:
        ValueError, IndexError: another field is there.
    """
    size, begin = record[at + 1], at + 2
    if size >= 0x80:
        size, begin = varint(record, at + 1, end)
    if record[at] != _SUBMESSAGE or begin + size > end:
        raise MalformedError("not the usual layout")
    return begin, begin + size


def usual_inside(record: bytes, at: int, end: int, tag: int) -> int:
    """Return where a field begins that fills all up to `end`.

    Raises:
        ValueError, IndexError: another field is there.
    """
    size, begin = record[at + 1], at + 2
    if size >= 0x80:
        size, begin = varint(record, at + 1, end)
    if record[at] != tag or begin + size != end:
        raise MalformedError("not the usual layout")
    return begin


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────


def field(number: int, value: bytes) -> bytes:
    """Return a field with a length; of the numbers up to 15."""
    return bytes([number << 3 | 2]) + varint_of(len(value)) + value


def varint_of(value: int) -> bytes:
    """Return the varint of an integer without a sign.

    >>> varint_of(300).hex()
    'ac02'
    """
    if value < 0x80:
        return bytes([value])
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
