"""tf.train.Example and SequenceExample, parsed by protobuf (but see example_fast_path.py), without TensorFlow.

    Example          1: Features                      SequenceExample   1: Features (the context)   2: FeatureLists
    Features         1: entries of a map: 1: name, 2: Feature
    FeatureLists     1: entries of a map: 1: name, 2: FeatureList
    FeatureList      1: Features of type Feature, one for each step
    Feature          one of  1: BytesList   2: FloatList   3: Int64List
    BytesList        1: bytes, any number of them
    FloatList        1: float32, packed (one field, 4 bytes each) or each a field
    Int64List        1: varints, packed or each a field

Maps are declared as what they are on the wire, repeated entries, of which the last one with a name counts; their values
as bytes, of which all parts together are the value: only what is wanted is parsed, and equal steps are one array.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from penstock.data.formats.tfrecord.protobuf_wire import (
    WORD,
    MalformedError,
    few_int64s,
    field,
    usual_inside,
    usual_span,
    varint_of,
)
from penstock.data.optional import need

Values = list[bytes] | list[int] | np.ndarray
"""A feature's values: bytes, integers (a list where they are few, else an int64 array), or a float32 array."""

Steps = list[Values] | np.ndarray
"""The values of each step: an array (steps, values) where all have as many numbers."""

_FLOATS, _INTS = 0x12, 0x1A
_FEW = 128
_FEW_NBYTES = 32
_FIELDS = {
    "BytesList": ["*bytes value"],
    "FloatList": ["*float value"],
    "Int64List": ["*int64 value"],
    "Feature": ["?BytesList bytes_list", "?FloatList float_list", "?Int64List int64_list"],
    "FeatureList": ["*Feature steps"],
    "Entry": ["string name", "*bytes parts"],
    "Map": ["*Entry entries"],
    "Example": ["Map features"],
    "SequenceExample": ["bytes context", "Map lists"],
}
"""The messages, with their fields in the order of their numbers: * is repeated, of those with ? the last one counts."""


@cache
def _message(name: str) -> Any:
    protos = need("google.protobuf.descriptor_pb2", "tfrecord")
    file = protos.FileDescriptorProto(name="penstock.proto", package="penstock", syntax="proto3")
    for own, fields in _FIELDS.items():
        made = file.message_type.add(name=own)
        for number, text in enumerate(fields, 1):
            kind, label = text.lstrip("*?").split()
            one = made.field.add(name=label, number=number, label=3 if text[0] == "*" else 1)
            if kind in _FIELDS:
                one.type_name = f".penstock.{kind}"
            one.type = 11 if kind in _FIELDS else {"bytes": 12, "string": 9, "float": 2, "int64": 3}[kind]
            if text[0] == "?":
                one.oneof_index = 0
        if fields[0][0] == "?":
            made.oneof_decl.add(name="kind")
    pool = need("google.protobuf.descriptor_pool", "tfrecord").DescriptorPool()
    pool.Add(file)
    factory = need("google.protobuf.message_factory", "tfrecord")
    return factory.GetMessageClass(pool.FindMessageTypeByName(f"penstock.{name}"))


def _parse(name: str, data: bytes) -> Any:
    try:
        return _message(name).FromString(data)
    except need("google.protobuf.message", "tfrecord").DecodeError as error:
        raise MalformedError(f"it is no {name}: {error}") from error


def parse_features(record: bytes, wanted: Container[str] | None = None) -> dict[str, Values | None]:
    """Return the features of a serialised Example, or of a SequenceExample's context: those that are wanted, or all.

    A feature that holds none of the three lists, as TFX writes a missing value, is None.

    Raises:
        MalformedError: it is no such message.
        ExtraError: protobuf is not installed.

    >>> parse_features(serialize_example({"label": [7], "text": [b"a", b"b"]}))
    {'label': [7], 'text': [b'a', b'b']}
    """
    parts = _wanted_parts(_parse("Example", record).features, wanted)
    return {name: _values(_parse("Feature", data)) for name, data in parts.items()}


def parse_feature_lists(record: bytes, wanted: Container[str] | None = None) -> dict[str, Steps]:
    """Return the feature lists of a serialised SequenceExample: the values of each step.

    Raises:
        MalformedError: it is no such message.
        ExtraError: protobuf is not installed.
    """
    found: dict[str, Steps] = {}
    for name, data in _wanted_parts(_parse("SequenceExample", record).lists, wanted).items():
        alike = _equal_steps(data)
        steps = () if alike is not None else map(_values, _parse("FeatureList", data).steps)
        found[name] = alike if alike is not None else [[] if step is None else step for step in steps]
    return found


def _wanted_parts(entries: Any, wanted: Container[str] | None) -> dict[str, bytes]:
    return {one.name: b"".join(one.parts) for one in entries.entries if wanted is None or one.name in wanted}


def parse_int64s(data: bytes, begin: int, end: int) -> list[int] | np.ndarray:
    """Return packed integers: a list where they are few, else an int64 array.

    Raises:
        MalformedError: a varint is too long, or ends in its middle.
    """
    if end - begin <= _FEW_NBYTES:
        return few_int64s(data[begin:end])
    return np.array(_parse("Int64List", field(1, data[begin:end])).value, np.int64)


def _values(feature: Any) -> Values | None:
    kind = feature.WhichOneof("kind")
    if kind is None:
        return None
    values = getattr(feature, kind).value
    if kind == "float_list":
        return np.array(values, np.float32)
    return np.array(values, np.int64) if kind == "int64_list" and len(values) > _FEW else list(values)


def _equal_steps(data: bytes) -> np.ndarray | None:
    """Return the steps as one array, if they are packed numbers and differ in nothing else; None if not."""
    try:
        kind_at, stop = usual_span(data, 0, len(data))
        kind = data[kind_at]
        begin = usual_inside(data, usual_inside(data, kind_at, stop, kind), stop, 0x0A)
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
        feature = field(3, field(1, b"".join(varint_of(int(value) % WORD) for value in values)))
    return field(1, field(1, name.encode()) + field(2, feature))
