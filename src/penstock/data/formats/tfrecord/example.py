"""The wire format of tf.train.Example, read and written without TensorFlow and without protobuf.

    Example          1: Features                      SequenceExample   1: Features (the context)   2: FeatureLists
    Features         1: entries of a map: 1: name, 2: Feature
    FeatureLists     1: entries of a map: 1: name, 2: FeatureList
    FeatureList      1: Features of type Feature, one for each step
    Feature          one of  1: BytesList   2: FloatList   3: Int64List
    BytesList        1: bytes, any number of them
    FloatList        1: float32, packed (one field, 4 bytes each) or each a field
    Int64List        1: varints, packed or each a field

`protobuf` reads the fields of a message. As its specification wants it, unknown fields are left out, the last of
several entries with one name counts, and a message that comes twice is both together.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.data.formats.tfrecord.protobuf_wire import (
    WORD,
    MalformedError,
    after,
    field,
    floats,
    int64s,
    signed,
    span,
    tagged,
    usual_inside,
    usual_span,
    varint,
    varint_of,
)

Values = list[bytes] | list[int] | np.ndarray
"""A feature's values: bytes, integers (a list where they are few, else an int64 array), or a float32 array."""

Steps = list[Values] | np.ndarray
"""The values of each step: an array (steps, values) where all have as many numbers."""

_SUBMESSAGE = 0x0A  # field 1, with a length
_SECOND = 0x12  # field 2, with a length
_UNPACKED_FLOAT = 0x0D
_UNPACKED_INT = 0x08
_KINDS = {0x0A: "bytes", 0x12: "float", 0x1A: "int"}


def parse_features(record: bytes, wanted: Container[str] | None = None) -> dict[str, Values]:
    """Return the features of a serialised Example, or of a SequenceExample's context.

    A feature that holds none of the three lists is left out, as if it were missing.

    Args:
        record: the message.
        wanted: the names to look at; None for all.

    Raises:
        MalformedError: it is no such message.

    >>> parse_features(serialize_example({"label": [7], "text": [b"a", b"b"]}))
    {'label': [7], 'text': [b'a', b'b']}
    """
    found: dict[str, Values | None] = {}
    at, end = 0, len(record)
    while at < end:
        tag, at = tagged(record, at, end)
        if tag == _SUBMESSAGE:
            at, stop = span(record, at, end)
            _read_map(record, at, stop, found, wanted)
            at = stop
        else:
            at = after(record, at, end, tag)
    return {name: values for name, values in found.items() if values is not None}


def parse_feature_lists(record: bytes, wanted: Container[str] | None = None) -> dict[str, Steps]:
    """Return the feature lists of a serialised SequenceExample: the values of each step.

    Raises:
        MalformedError: it is no such message.
    """
    found: dict[str, Steps] = {}
    at, end = 0, len(record)
    while at < end:
        tag, at = tagged(record, at, end)
        if tag != _SECOND:
            at = after(record, at, end, tag)
            continue
        at, stop = span(record, at, end)
        while at < stop:
            tag, at = tagged(record, at, stop)
            if tag != _SUBMESSAGE:
                at = after(record, at, stop, tag)
                continue
            at, entry = span(record, at, stop)
            name, spans = _entry(record, at, entry)
            if wanted is None or name in wanted:
                alike = _equal_steps(record, *spans[0]) if len(spans) == 1 else None
                found[name] = alike if alike is not None else [one for span in spans for one in _steps(record, *span)]
            at = entry
    return found


def serialize_example(features: Mapping[str, Sequence[bytes] | Sequence[int] | np.ndarray]) -> bytes:
    """Return an Example: bytes and integers as sequences, floats as a float32 array.

    >>> serialize_example({"a": [1]}).hex(" ")
    '0a 0c 0a 0a 0a 01 61 12 05 1a 03 0a 01 01'
    """
    return wrap_entries(b"".join(serialize_entry(name, values) for name, values in features.items()))


def wrap_entries(entries: bytes) -> bytes:
    """Return the Example that has these entries."""
    return field(1, entries)


def serialize_entry(name: str, values: Sequence[bytes] | Sequence[int] | np.ndarray) -> bytes:
    """Return one entry of the map in Features; entries one after another are the map."""
    if isinstance(values, np.ndarray):
        feature = field(2, field(1, np.ascontiguousarray(values, "<f4").tobytes()))
    elif values and isinstance(values[0], bytes):
        feature = field(1, b"".join(field(1, value) for value in values if isinstance(value, bytes)))
    else:
        feature = field(3, field(1, b"".join(varint_of(int(value) % WORD) for value in values)))
    return field(1, field(1, name.encode()) + field(2, feature))


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────


def _read_map(data: bytes, at: int, end: int, found: dict[str, Values | None], wanted: Container[str] | None) -> None:
    while at < end:
        tag, at = tagged(data, at, end)
        if tag != _SUBMESSAGE:
            at = after(data, at, end, tag)
            continue
        at, stop = span(data, at, end)
        name, spans = _entry(data, at, stop)
        if wanted is None or name in wanted:
            found[name] = _feature(data, spans)
        at = stop


def _entry(data: bytes, at: int, end: int) -> tuple[str, list[tuple[int, int]]]:
    """Return a map entry's name, and where its value's parts lie: all of them together are the value."""
    name, spans = b"", []
    while at < end:
        tag, at = tagged(data, at, end)
        if tag == _SUBMESSAGE:
            at, stop = span(data, at, end)
            name, at = data[at:stop], stop
        elif tag == _SECOND:
            at, stop = span(data, at, end)
            spans.append((at, stop))
            at = stop
        else:
            at = after(data, at, end, tag)
    try:
        return name.decode(), spans
    except UnicodeDecodeError as error:
        raise MalformedError(f"the name {name[:40]!r} of a feature is no UTF-8") from error


def _equal_steps(data: bytes, at: int, end: int) -> np.ndarray | None:
    """Return the steps as one array, if they are packed numbers and differ in nothing else; None if not."""
    try:
        kind_at, stop = usual_span(data, at, end)
        kind = data[kind_at]
        begin = usual_inside(data, usual_inside(data, kind_at, stop, kind), stop, _SUBMESSAGE)
    except (IndexError, ValueError):
        return None
    if (end - at) % (stop - at) or begin == stop:
        return None
    rows = np.frombuffer(data, np.uint8, end - at, at).reshape(-1, stop - at)
    head, values = rows[:, : begin - at], rows[:, begin - at :]
    if (head != head[0]).any():
        return None
    if _KINDS.get(kind) == "float" and (stop - begin) % 4 == 0:
        return np.ascontiguousarray(values).view("<f4")
    if _KINDS.get(kind) == "int" and (values < 0x80).all():
        return values.astype(np.int64)
    return None


def _steps(data: bytes, at: int, end: int) -> list[Values]:
    steps: list[Values] = []
    while at < end:
        tag, at = tagged(data, at, end)
        if tag == _SUBMESSAGE:
            at, stop = span(data, at, end)
            values = _feature(data, [(at, stop)])
            steps.append([] if values is None else values)
            at = stop
        else:
            at = after(data, at, end, tag)
    return steps


def _feature(data: bytes, spans: list[tuple[int, int]]) -> Values | None:
    kind = ""
    parts: list[Any] = []
    for at, end in spans:
        while at < end:
            tag, at = tagged(data, at, end)
            if tag not in _KINDS:
                at = after(data, at, end, tag)
                continue
            if _KINDS[tag] != kind:  # of several kinds the last one counts
                kind, parts = _KINDS[tag], []
            at, stop = span(data, at, end)
            parts += _READERS[kind](data, at, stop)
            at = stop
    if not kind:
        return None
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
        tag, at = tagged(data, at, end)
        if tag == _SUBMESSAGE:
            at, stop = span(data, at, end)
            values.append(data[at:stop])
            at = stop
        else:
            at = after(data, at, end, tag)
    return [values]


def _float_list(data: bytes, at: int, end: int) -> list[Values]:
    parts: list[Values] = []
    while at < end:
        tag, at = tagged(data, at, end)
        if tag == _SUBMESSAGE:
            at, stop = span(data, at, end)
            parts.append(floats(data, at, stop))
            at = stop
        elif tag == _UNPACKED_FLOAT:
            if at + 4 > end:
                raise MalformedError("a float ends in its middle")
            parts.append(np.frombuffer(data, "<f4", 1, at))
            at += 4
        else:
            at = after(data, at, end, tag)
    return parts


def _int64_list(data: bytes, at: int, end: int) -> list[Values]:
    parts: list[Values] = []
    while at < end:
        tag, at = tagged(data, at, end)
        if tag == _SUBMESSAGE:
            at, stop = span(data, at, end)
            parts.append(int64s(data, at, stop))
            at = stop
        elif tag == _UNPACKED_INT:
            value, at = varint(data, at, end)
            parts.append([signed(value)])
        else:
            at = after(data, at, end, tag)
    return parts


_READERS = {"bytes": _bytes_list, "float": _float_list, "int": _int64_list}


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────
