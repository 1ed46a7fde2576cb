"""The wire format of tf.train.Example, read and written without TensorFlow and without protobuf.

    Example          1: Features                      SequenceExample   1: Features (the context)   2: FeatureLists
    Features         1: entries of a map: 1: name, 2: Feature
    FeatureLists     1: entries of a map: 1: name, 2: FeatureList
    FeatureList      1: Features of type Feature, one for each step
    Feature          one of  1: BytesList   2: FloatList   3: Int64List
    BytesList        1: bytes, any number of them
    FloatList        1: float32, packed (one field, 4 bytes each) or each a field
    Int64List        1: varints, packed or each a field

A message is fields in any order: a varint of `number << 3 | type`, then a varint (type 0), 8 bytes (1), a varint of a
length and as many bytes (2), a group up to its end (3, 4), or 4 bytes (5). A varint has 7 bits in a byte, the lowest
first, and the highest bit of each byte but the last is set. As the encoding's specification wants it, unknown fields
are left out, the last of several entries with one name counts, and a message that comes twice is both together.
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

Values = list[bytes] | list[int] | np.ndarray
"""A feature's values: bytes, integers (a list where they are few, else an int64 array), or a float32 array."""

_SUBMESSAGE = 0x0A  # field 1, with a length
_SECOND = 0x12  # field 2, with a length
_UNPACKED_FLOAT = 0x0D
_UNPACKED_INT = 0x08
_KINDS = {0x0A: "bytes", 0x12: "float", 0x1A: "int"}
_FEW_NBYTES = 128
"""Up to here a loop over varints is faster than NumPy's first call."""
_DEEPEST = 100
_WORD = 1 << 64


class MalformedError(ValueError):
    """These bytes are no such message."""


def parsed(record: bytes, wanted: Container[str] | None = None) -> dict[str, Values]:
    """Return the features of a serialised Example, or of a SequenceExample's context.

    A feature that holds none of the three lists is left out, as if it were missing.

    Args:
        record: the message.
        wanted: the names to look at; None for all.

    Raises:
        MalformedError: it is no such message.

    >>> parsed(serialised({"label": [7], "text": [b"a", b"b"]}))
    {'label': [7], 'text': [b'a', b'b']}
    """
    found: dict[str, Values | None] = {}
    at, end = 0, len(record)
    while at < end:
        tag, at = _tag(record, at, end)
        if tag == _SUBMESSAGE:
            at, stop = _span(record, at, end)
            _read_map(record, at, stop, found, wanted)
            at = stop
        else:
            at = _after(record, at, end, tag)
    return {name: values for name, values in found.items() if values is not None}


def sequences(record: bytes, wanted: Container[str] | None = None) -> dict[str, list[Values]]:
    """Return the feature lists of a serialised SequenceExample: the values of each step.

    Raises:
        MalformedError: it is no such message.
    """
    found: dict[str, list[Values]] = {}
    at, end = 0, len(record)
    while at < end:
        tag, at = _tag(record, at, end)
        if tag != _SECOND:
            at = _after(record, at, end, tag)
            continue
        at, stop = _span(record, at, end)
        while at < stop:
            tag, at = _tag(record, at, stop)
            if tag != _SUBMESSAGE:
                at = _after(record, at, stop, tag)
                continue
            at, entry = _span(record, at, stop)
            name, spans = _entry(record, at, entry)
            if wanted is None or name in wanted:
                found[name] = [values for span in spans for values in _steps(record, *span)]
            at = entry
    return found


def serialised(features: Mapping[str, Sequence[bytes] | Sequence[int] | np.ndarray]) -> bytes:
    """Return an Example: bytes and integers as sequences, floats as a float32 array.

    >>> serialised({"a": [1]}).hex(" ")
    '0a 0c 0a 0a 0a 01 61 12 05 1a 03 0a 01 01'
    """
    return enclosed(b"".join(entry(name, values) for name, values in features.items()))


def enclosed(entries: bytes) -> bytes:
    """Return the Example that has these entries."""
    return _field(1, entries)


def entry(name: str, values: Sequence[bytes] | Sequence[int] | np.ndarray) -> bytes:
    """Return one entry of the map in Features; entries one after another are the map."""
    if isinstance(values, np.ndarray):
        feature = _field(2, _field(1, np.ascontiguousarray(values, "<f4").tobytes()))
    elif values and isinstance(values[0], bytes):
        feature = _field(1, b"".join(_field(1, value) for value in values if isinstance(value, bytes)))
    else:
        feature = _field(3, _field(1, b"".join(_varint_of(int(value) % _WORD) for value in values)))
    return _field(1, _field(1, name.encode()) + _field(2, feature))


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────


def _read_map(data: bytes, at: int, end: int, found: dict[str, Values | None], wanted: Container[str] | None) -> None:
    while at < end:
        tag, at = _tag(data, at, end)
        if tag != _SUBMESSAGE:
            at = _after(data, at, end, tag)
            continue
        at, stop = _span(data, at, end)
        usual = _usual(data, at, stop)
        if usual is not None:
            name, kind, begin = usual
            if wanted is None or name in wanted:
                parts = _READERS[kind](data, begin, stop)
                found[name] = parts[0] if len(parts) == 1 else _together(kind, parts)
        else:
            name, spans = _entry(data, at, stop)
            if wanted is None or name in wanted:
                found[name] = _feature(data, spans)
        at = stop


def _usual(data: bytes, at: int, end: int) -> tuple[str, str, int] | None:
    """Return a map entry's name, its kind, and where its list begins, if it is laid out as all writers do it.

    That is: the name, of less than 128 bytes, then a feature that is one list, and nothing else. Anything else is for
    `_entry` to read, or to refuse. Most of a record's time is spent here; hence no call for each of the small varints.
    """
    try:
        if data[at] != _SUBMESSAGE or data[at + 1] >= 0x80:
            return None
        begin = at + 2
        at = begin + data[at + 1]
        if data[at] != _SECOND:
            return None
        size, value = data[at + 1], at + 2
        if size >= 0x80:
            size, value = _varint(data, at + 1, end)
        if value + size != end:
            return None
        kind = _KINDS.get(data[value])
        size, list_ = data[value + 1], value + 2
        if size >= 0x80:
            size, list_ = _varint(data, value + 1, end)
        if kind is None or list_ + size != end:
            return None
        return data[begin:at].decode(), kind, list_
    except (IndexError, MalformedError, UnicodeDecodeError):
        return None


def _entry(data: bytes, at: int, end: int) -> tuple[str, list[tuple[int, int]]]:
    """Return a map entry's name, and where its value's parts lie: all of them together are the value."""
    name, spans = b"", []
    while at < end:
        tag, at = _tag(data, at, end)
        if tag == _SUBMESSAGE:
            at, stop = _span(data, at, end)
            name, at = data[at:stop], stop
        elif tag == _SECOND:
            at, stop = _span(data, at, end)
            spans.append((at, stop))
            at = stop
        else:
            at = _after(data, at, end, tag)
    try:
        return name.decode(), spans
    except UnicodeDecodeError as error:
        raise MalformedError(f"the name {name[:40]!r} of a feature is no UTF-8") from error


def _steps(data: bytes, at: int, end: int) -> list[Values]:
    steps: list[Values] = []
    while at < end:
        tag, at = _tag(data, at, end)
        if tag == _SUBMESSAGE:
            at, stop = _span(data, at, end)
            values = _feature(data, [(at, stop)])
            steps.append([] if values is None else values)
            at = stop
        else:
            at = _after(data, at, end, tag)
    return steps


def _feature(data: bytes, spans: list[tuple[int, int]]) -> Values | None:
    kind = ""
    parts: list[Any] = []
    for at, end in spans:
        while at < end:
            tag, at = _tag(data, at, end)
            if tag not in _KINDS:
                at = _after(data, at, end, tag)
                continue
            if _KINDS[tag] != kind:  # of several kinds the last one counts
                kind, parts = _KINDS[tag], []
            at, stop = _span(data, at, end)
            parts += _READERS[kind](data, at, stop)
            at = stop
    return _together(kind, parts) if kind else None


def _together(kind: str, parts: list[Any]) -> Values:
    if len(parts) == 1:
        only: Values = parts[0]
        return only
    if kind == "float":
        return np.concatenate([np.zeros(0, np.float32), *parts])
    if any(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate([np.asarray(part, np.int64) for part in parts])
    return [value for part in parts for value in part]


def _bytes_list(data: bytes, at: int, end: int) -> list[Values]:
    values: list[bytes] = []
    while at < end:
        tag, at = _tag(data, at, end)
        if tag == _SUBMESSAGE:
            at, stop = _span(data, at, end)
            values.append(data[at:stop])
            at = stop
        else:
            at = _after(data, at, end, tag)
    return [values]


def _float_list(data: bytes, at: int, end: int) -> list[Values]:
    parts: list[Values] = []
    while at < end:
        tag, at = _tag(data, at, end)
        if tag == _SUBMESSAGE:
            at, stop = _span(data, at, end)
            if (stop - at) % 4:
                raise MalformedError(f"{stop - at} bytes of packed floats are not a multiple of 4")
            parts.append(np.frombuffer(data, "<f4", (stop - at) // 4, at))
            at = stop
        elif tag == _UNPACKED_FLOAT:
            if at + 4 > end:
                raise MalformedError("a float ends in its middle")
            parts.append(np.frombuffer(data, "<f4", 1, at))
            at += 4
        else:
            at = _after(data, at, end, tag)
    return parts


def _int64_list(data: bytes, at: int, end: int) -> list[Values]:
    parts: list[Values] = []
    while at < end:
        tag, at = _tag(data, at, end)
        if tag == _SUBMESSAGE:
            at, stop = _span(data, at, end)
            parts.append(_int64s(data, at, stop))
            at = stop
        elif tag == _UNPACKED_INT:
            value, at = _varint(data, at, end)
            parts.append([_signed(value)])
        else:
            at = _after(data, at, end, tag)
    return parts


_READERS = {"bytes": _bytes_list, "float": _float_list, "int": _int64_list}


def _int64s(data: bytes, at: int, end: int) -> Values:
    if end - at <= _FEW_NBYTES:
        return _few_int64s(data[at:end])
    packed = np.frombuffer(data, np.uint8, end - at, at)
    lasts = np.flatnonzero(packed < 0x80)
    if len(lasts) == len(packed):
        return packed.astype(np.int64)
    if not len(lasts) or lasts[-1] != len(packed) - 1:
        raise MalformedError("a varint ends in its middle")
    firsts = np.concatenate([[0], lasts[:-1] + 1])
    lengths = lasts - firsts + 1
    if lengths.max() > 10:
        raise MalformedError("a varint is longer than 10 bytes")
    found: np.ndarray = (packed[firsts] & 0x7F).astype(np.uint64)
    for number in range(1, int(lengths.max())):
        longer = np.flatnonzero(lengths > number)
        bits = (packed[firsts[longer] + number] & 0x7F).astype(np.uint64)
        found[longer] |= bits << np.uint64(7 * number)
    return found.view(np.int64)


def _few_int64s(data: bytes) -> list[int]:
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
            value = _signed(value % _WORD)
        values.append(value)
        value = shift = 0
    if shift:
        raise MalformedError("a varint ends in its middle, or is longer than 10 bytes")
    return values


def _tag(data: bytes, at: int, end: int) -> tuple[int, int]:
    tag = data[at]
    if tag < 0x80:
        return tag, at + 1
    tag, at = _varint(data, at, end)
    if tag >= 1 << 32:
        raise MalformedError("the number of a field is too large")
    return tag, at


def _span(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return where a field with a length begins and ends."""
    length = data[at] if at < end else 0x80
    at += 1
    if length >= 0x80:
        length, at = _varint(data, at - 1, end)
    if length > end - at:
        raise MalformedError(f"a field is {length} bytes long, and {end - at} are left")
    return at, at + length


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
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
            return value % _WORD, at
    raise MalformedError("a varint is longer than 10 bytes")


def _signed(value: int) -> int:
    return value - _WORD if value >= _WORD >> 1 else value


def _after(data: bytes, at: int, end: int, tag: int, depth: int = 0) -> int:
    """Return where an unknown field ends, whose tag has been read."""
    kind = tag & 7
    if tag < 8:
        raise MalformedError("a field has the number 0")
    if kind == 0:
        _, at = _varint(data, at, end)
    elif kind in (1, 5):
        at += 8 if kind == 1 else 4
    elif kind == 2:
        _, at = _span(data, at, end)
    elif kind == 3 and depth < _DEEPEST:
        return _after_group(data, at, end, tag, depth + 1)
    else:
        raise MalformedError(f"a field has the type {kind}, where none can be")
    if at > end:
        raise MalformedError("a field ends in its middle")
    return at


def _after_group(data: bytes, at: int, end: int, begun: int, depth: int) -> int:
    while at < end:
        tag, at = _tag(data, at, end)
        if tag & 7 == 4:
            if tag >> 3 != begun >> 3:
                break
            return at
        at = _after(data, at, end, tag, depth)
    raise MalformedError("a group has no end")


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────


def _field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint_of(len(value)) + value


def _varint_of(value: int) -> bytes:
    if value < 0x80:
        return bytes([value])
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
