"""tf.train.Example and SequenceExample, parsed and written without TensorFlow or protobuf.

    Example          1: Features                      SequenceExample   1: Features (the context)   2: FeatureLists
    Features         1: entries of a map: 1: name, 2: Feature
    FeatureLists     1: entries of a map: 1: name, 2: FeatureList
    FeatureList      1: Features of type Feature, one for each step
    Feature          one of  1: BytesList   2: FloatList   3: Int64List
    BytesList        1: bytes, any number of them
    FloatList        1: float32, packed (one field, 4 bytes each) or each a field
    Int64List        1: varints, packed or each a field

On the wire a message is fields in any order, each a tag and a value. The tag is a varint of `number << 3 | type`. By
its type the value is a varint (0), 8 bytes (1), a varint of a length and as many bytes (2), a group up to its end (3,
4), or 4 bytes (5). A varint has 7 bits in a byte, the lowest first, and the highest bit of each byte but the last is
set; a negative int64 is one of 10 bytes. Of the entries with one name, and of the three lists of a feature, the last
counts.
https://protobuf.dev/programming-guides/encoding/

Usual records are one Features message whose entries are a name and a feature of one list, which is packed or a single
string of bytes. Their values are found in one pass; of many records of one length, whose bytes between the values are
the same, they are taken all at once.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

import numpy as np

Values = list[bytes] | list[int] | np.ndarray
"""A feature's values: bytes, integers (a list where they are few, else an int64 array), or a float32 array."""

Steps = list[Values] | np.ndarray
"""The values of each step: an array (steps, values) where all have as many numbers."""

_WORD = 1 << 64
_FIRST, _SECOND = 0x0A, 0x12
_BYTES, _FLOATS, _INTS = 0x0A, 0x12, 0x1A
_PARTS = {_BYTES: (0x0A,), _FLOATS: (0x0A, 0x0D), _INTS: (0x0A, 0x08)}
"""The tags of values, packed and not, by the tag of their list in a feature."""
_FEW_NBYTES = 32
_MOST_FEATURES = 1 << 16
"""Of what counts as usual."""
_TAKEN_OF_EACH = 32
"""What parsing takes of each byte that is not within a string or packed floats, of tiny values: 29 were seen."""
_MOST_GROUPS = 100
_SIZE_NBYTES = 5
"""The most that the varint of a tag or a length takes."""


class MalformedError(ValueError):
    """These bytes are no such message."""


def parse_features(record: bytes, wanted: Container[str] | None = None) -> dict[str, Values | None]:
    """Return the features of a serialised Example, or of a SequenceExample's context: those that are wanted, or all.

    A feature that holds none of the three lists, as TFX writes a missing value, is None.

    Raises:
        MalformedError: it is no such message.

    >>> parse_features(serialize_example({"label": [7], "text": [b"a", b"b"]}))
    {'label': [7], 'text': [b'a', b'b']}
    """
    return {name: _values(data, 0, len(data)) for name, data in _entries(record, _FIRST, wanted).items()}


def parse_feature_lists(record: bytes, wanted: Container[str] | None = None) -> dict[str, Steps]:
    """Return the feature lists of a serialised SequenceExample: the values of each step.

    Raises:
        MalformedError: it is no such message.
    """
    found: dict[str, Steps] = {}
    for name, data in _entries(record, _SECOND, wanted).items():
        alike = _equal_steps(data)
        steps = () if alike is not None else (one for one in _fields(data, 0, len(data)) if one[0] == _FIRST)
        values = (_values(data, begin, end) for _, begin, end in steps)
        found[name] = alike if alike is not None else [[] if one is None else one for one in values]
    return found


def parse_usual(record: bytes, wanted: Container[str] | None = None) -> dict[str, Values] | None:
    """Return the features, as `parse_features` does; None where the record is not a usual one.

    >>> parse_usual(serialize_example({"label": [7]}))
    {'label': [7]}
    """
    places = _places(record)
    if places is None:
        return None
    return {name: _packed(kind, record, *at) for name, kind, *at in places if wanted is None or name in wanted}


def parse_alike(
    records: Sequence[bytes], rows: np.ndarray, wanted: Container[str] | None = None
) -> dict[str, np.ndarray | list[bytes]] | None:
    """Return the features of several records: of numbers an array [records, values], else the bytes of each.

    Args:
        records: of one length.
        rows: the same, uint8[records, bytes].
        wanted: the features; None for all.

    Returns:
        None where one is laid out in another way.

    Raises:
        MalformedError: a varint is too long.
    """
    places = _places(records[0])
    if places is None:
        return None
    for begin, (_, _, end, _) in zip([0, *(end for *_, end in places)], places, strict=False):
        if rows[:, begin:end].tobytes() != records[0][begin:end] * len(rows):
            return None
    found: dict[str, np.ndarray | list[bytes]] = {}
    for name, kind, begin, end in places:
        if wanted is not None and name not in wanted:
            continue
        values: np.ndarray | list[bytes] | None = None
        if kind == _BYTES:
            values = [record[begin:end] for record in records]
        elif kind == _INTS and begin < end:
            values = _int64_rows(rows[:, begin:end])
        elif kind == _FLOATS and begin < end and (end - begin) % 4 == 0:
            values = np.ascontiguousarray(rows[:, begin:end]).view("<f4")
        if values is None:
            return None
        found[name] = values
    return found


def parsed_nbytes(record: bytes) -> int:
    """Return the most that parsing a record takes: strings and packed floats as much as they have, all else more.

    >>> parsed_nbytes(serialize_example({"x": [bytes(1000)]})), parsed_nbytes(serialize_example({"x": [0] * 1000}))
    (1576, 32576)
    """
    kept = sum(end - begin for _, kind, begin, end in _places(record) or [] if kind != _INTS)
    return kept + _TAKEN_OF_EACH * (len(record) - kept)


# ── the wire ────────────────────────────────────────────────────────────────────────────────────────────────


def _varint(data: bytes, at: int, end: int, most: int = 10) -> tuple[int, int]:
    """Return an integer of 64 bits without a sign, and where it ends."""
    value = 0
    for number in range(most):
        if at >= end:
            raise MalformedError("it is no tf.train.Example: a varint ends in its middle")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * number)
        if byte < 0x80:
            return value % _WORD, at
    raise MalformedError(f"it is no tf.train.Example: a varint is longer than {most} bytes")


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the tag of each field, and where its value begins and ends. Groups are left out."""
    groups: list[int] = []
    while at < end:
        tag, begin = data[at], at + 1  # of most it is the whole varint
        if tag >= 0x80:
            tag, begin = _varint(data, at, end, _SIZE_NBYTES)
        kind = tag & 7
        if kind == 2:
            size = data[begin] if begin < end else 0x80
            if size < 0x80:
                begin += 1
            else:
                size, begin = _varint(data, begin, end, _SIZE_NBYTES)
            at = begin + size
        elif kind == 3:
            groups.append(tag >> 3)
            at = begin
        elif kind == 4:
            if not groups or groups.pop() != tag >> 3:
                raise MalformedError("it is no tf.train.Example: a group ends that has not begun")
            at = begin
            continue
        else:
            at = _varint(data, begin, end)[1] if kind == 0 else begin + {1: 8, 5: 4}.get(kind, _WORD)
        if at > end or tag < 8 or tag >> 32 or len(groups) > _MOST_GROUPS:
            raise MalformedError(f"it is no tf.train.Example: a field of number {tag >> 3} ends behind it, or is none")
        if not groups:
            yield tag, begin, at
    if groups:
        raise MalformedError("it is no tf.train.Example: a group does not end")


def _entries(record: bytes, field: int, wanted: Container[str] | None) -> dict[str, bytes]:
    """Return the values of the entries of a map, of which one may come in parts."""
    found: dict[str, bytes] = {}
    for tag, outer, outer_end in _fields(record, 0, len(record)):
        if tag != field:
            continue
        usual = _usual_entries(record, outer, outer_end)
        if usual is not None:
            found |= {name: record[begin:end] for name, begin, end in usual if wanted is None or name in wanted}
            continue
        for inner, begin, end in _fields(record, outer, outer_end):
            if inner != _FIRST:
                continue
            name, parts = "", []
            for own, at, stop in _fields(record, begin, end):
                if own == _FIRST:
                    name = _name(record[at:stop])
                elif own == _SECOND:
                    parts.append(record[at:stop])
            if wanted is None or name in wanted:
                found[name] = b"".join(parts)
    return found


def _name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise MalformedError(f"it is no tf.train.Example: a name is no UTF-8: {error}") from error


def _values(data: bytes, begin: int, end: int) -> Values | None:
    """Return the values of a Feature."""
    try:
        kind = data[begin]
        at = _inside(data, _inside(data, begin, end, kind), end, _FIRST)
        if kind in _PARTS:
            return _packed(kind, data, at, end)
    except (IndexError, ValueError):  # not usual, or broken
        pass
    last, found = 0, list[Values]()
    for kind, at, stop in _fields(data, begin, end):
        if kind in _PARTS:
            found = found if kind == last else []
            last = kind
            found += [_packed(kind, data, *own) for tag, *own in _fields(data, at, stop) if tag in _PARTS[kind]]
    if len(found) == 1:
        return found[0]
    if last in (0, _BYTES):
        return [value for values in found for value in values] if last else None  # type: ignore[return-value]
    dtype = np.float32 if last == _FLOATS else np.int64
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(values, dtype) for values in found)])


def _packed(kind: int, data: bytes, begin: int, end: int) -> Values:
    """Return packed values, or a single one."""
    if kind == _BYTES:
        return [data[begin:end]]
    if kind == _FLOATS:
        if (end - begin) % 4:
            raise MalformedError(f"it is no tf.train.Example: packed floats of {end - begin} bytes")
        return np.frombuffer(data, "<f4", (end - begin) // 4, begin)
    if end - begin > _FEW_NBYTES:
        rows = _int64_rows(np.frombuffer(data, np.uint8, end - begin, begin)[None])
        return rows[0] if rows is not None else []
    values = []
    value = shift = 0
    for byte in data[begin:end]:
        value |= (byte & 0x7F) << shift
        if byte >= 0x80:
            shift += 7
            continue
        if shift >= 63:
            if shift > 63:
                break
            value %= _WORD
            value -= _WORD if value >= _WORD >> 1 else 0
        values.append(value)
        value = shift = 0
    if shift:
        raise MalformedError("it is no tf.train.Example: a varint ends in its middle, or is longer than 10 bytes")
    return values


def _int64_rows(packed: np.ndarray) -> np.ndarray | None:
    """Return packed integers of many messages, uint8[messages, bytes], as int64[messages, integers].

    None where they do not lie at the same places.
    """
    is_last = packed < 0x80
    if (is_last != is_last[0]).any():
        return None
    lasts = np.flatnonzero(is_last[0])
    if not len(lasts) or lasts[-1] != packed.shape[1] - 1:
        raise MalformedError("it is no tf.train.Example: a varint ends in its middle")
    firsts = np.concatenate([[0], lasts[:-1] + 1])
    lengths = lasts - firsts + 1
    if lengths.max() > 10:
        raise MalformedError("it is no tf.train.Example: a varint is longer than 10 bytes")
    found: np.ndarray = (packed[:, firsts] & 0x7F).astype(np.uint64)
    for number in range(1, int(lengths.max())):
        longer = np.flatnonzero(lengths > number)
        bits = (packed[:, firsts[longer] + number] & 0x7F).astype(np.uint64)
        found[:, longer] |= bits << np.uint64(7 * number)
    return found.view(np.int64)


# ── usual records ───────────────────────────────────────────────────────────────────────────────────────────


def _span(record: bytes, at: int, end: int) -> tuple[int, int]:
    """Return where field 1 begins and ends; IndexError or ValueError where another one is there."""
    size, begin = record[at + 1], at + 2
    if size >= 0x80:
        size, begin = _varint(record, at + 1, end, _SIZE_NBYTES)
    if record[at] != _FIRST or begin + size > end:
        raise MalformedError("not usual")
    return begin, begin + size


def _inside(record: bytes, at: int, end: int, tag: int) -> int:
    """Return where a field begins that fills all up to `end`; IndexError or ValueError where none does."""
    size, begin = record[at + 1], at + 2
    if size >= 0x80:
        size, begin = _varint(record, at + 1, end, _SIZE_NBYTES)
    if record[at] != tag or begin + size != end:
        raise MalformedError("not usual")
    return begin


def _usual_entries(record: bytes, at: int, end: int) -> list[tuple[str, int, int]] | None:
    """Return each entry's name, and where its value begins and ends; None where the entries are not usual."""
    entries: list[tuple[str, int, int]] = []
    try:
        while at < end and len(entries) < _MOST_FEATURES:
            at, stop = _span(record, at, end)
            name_at, value_at = _span(record, at, stop)
            begin = _inside(record, value_at, stop, _SECOND)
            entries.append((record[name_at:value_at].decode(), begin, stop))
            at = stop
    except (IndexError, ValueError):
        return None
    return entries if at == end else None


def _places(record: bytes) -> list[tuple[str, int, int, int]] | None:
    """Return each feature's name and kind, and where its values begin and end; None where the record is not usual."""
    end = len(record)
    places: list[tuple[str, int, int, int]] = []
    try:
        for name, at, stop in _usual_entries(record, _inside(record, 0, end, _FIRST), end) or ():
            kind = record[at]
            begin = _inside(record, _inside(record, at, stop, kind), stop, _FIRST)
            if kind not in _PARTS:
                return None
            places.append((name, kind, begin, stop))
    except (IndexError, ValueError):
        return None
    return places or None


def _equal_steps(data: bytes) -> np.ndarray | None:
    """Return the steps as one array, if they are packed numbers and differ in nothing else; None if not."""
    try:
        kind_at, stop = _span(data, 0, len(data))
        kind = data[kind_at]
        begin = _inside(data, _inside(data, kind_at, stop, kind), stop, _FIRST)
    except (IndexError, ValueError):
        return None
    if len(data) % stop or begin == stop:
        return None
    rows = np.frombuffer(data, np.uint8).reshape(-1, stop)
    head, values = rows[:, :begin], rows[:, begin:]
    if (head != head[0]).any():
        return None
    if kind == _FLOATS and (stop - begin) % 4 == 0:
        return np.ascontiguousarray(values).view("<f4")
    return values.astype(np.int64) if kind == _INTS and (values < 0x80).all() else None


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────


def serialize_example(features: Mapping[str, Sequence[bytes] | Sequence[int] | np.ndarray]) -> bytes:
    """Return an Example: bytes and integers as sequences, floats as a float32 array.

    >>> serialize_example({"a": [1]}).hex(" ")
    '0a 0c 0a 0a 0a 01 61 12 05 1a 03 0a 01 01'
    """
    return field(1, b"".join(serialize_entry(name, values) for name, values in features.items()))


def serialize_entry(name: str, values: Sequence[bytes] | Sequence[int] | np.ndarray) -> bytes:
    """Return one entry of the map in Features; entries one after another are the map."""
    if isinstance(values, np.ndarray):
        feature = field(2, field(1, np.ascontiguousarray(values, "<f4").tobytes()))
    elif values and isinstance(values[0], bytes):
        feature = field(1, b"".join(field(1, value) for value in values if isinstance(value, bytes)))
    else:
        feature = field(3, field(1, b"".join(varint_of(int(value) % _WORD) for value in values)))
    return field(1, field(1, name.encode()) + field(2, feature))


def field(number: int, value: bytes) -> bytes:
    """Return a field with a length; of the numbers up to 15."""
    return bytes([number << 3 | 2]) + varint_of(len(value)) + value


def varint_of(value: int) -> bytes:
    """Return the varint of an integer without a sign.

    >>> varint_of(300).hex()
    'ac02'
    """
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
