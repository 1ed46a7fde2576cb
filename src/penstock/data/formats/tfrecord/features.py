"""How a sample's fields lie in the features of a tf.train.Example.

Files of others are read as they lie. A feature with one value is bytes, an int64 or a float32 number; with any other
number of values an int64 or float32 array, or a list of bytes.

In files that penstock wrote, a hidden feature `__penstock__` of each record lists its fields, so that samples come back
as they were: JSON, the same in every record of a file, and values as bytes, both as in stored_fields.py, but

    float32          a float list; arrays in C order
    an int64 number  an integer list
    NAME/shape       of an array whose size differs from sample to sample: an integer list
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats import stored_fields
from penstock.data.formats.stored_fields import fields_from_json, fields_to_json, from_bytes, to_bytes
from penstock.data.formats.tfrecord.example import MalformedError, Values, serialize_entry
from penstock.data.formats.tfrecord.example import field as wire_field
from penstock.data.schema import Field, Sample, Schema, Selection, fitted

MARK = "__penstock__"
"""The feature with the schema of a record."""

_SHAPE = "/shape"
_NATIVE: dict[str, np.dtype] = {"f": np.dtype(np.float32), "i": np.dtype(np.int64)}


def with_shape_features(names: Collection[str]) -> frozenset[str]:
    """Return the features that are needed to make the fields with these names.

    >>> sorted(with_shape_features(["x"]))
    ['__penstock__', 'x', 'x/shape']
    """
    return frozenset({MARK, *names, *(name + _SHAPE for name in names)})


# ── files of others ─────────────────────────────────────────────────────────────────────────────────────────


def to_field_value(values: Values, *, is_text: bool = False, is_array: bool = False) -> Any:
    """Return a field's value, given the values of its feature.

    Args:
        values: as they were parsed.
        is_text: bytes are UTF-8.
        is_array: one value is an array (or a list) of one, too.

    Raises:
        MalformedError: it is no UTF-8.

    >>> to_field_value([7]), to_field_value([7], is_array=True), to_field_value([b"cat"], is_text=True)
    (np.int64(7), array([7]), 'cat')
    """
    if isinstance(values, np.ndarray):
        return values[0] if len(values) == 1 and not is_array else values.astype(_NATIVE[values.dtype.kind])
    if values and isinstance(values[0], bytes):
        found = [_decoded(value) for value in values] if is_text else values
        return found[0] if len(found) == 1 and not is_array else found
    return np.int64(values[0]) if len(values) == 1 and not is_array else np.array(values, np.int64)


def _decoded(value: Any) -> str:
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError as error:
        raise MalformedError(f"it is no UTF-8: {error}") from error


# ── files of ours ───────────────────────────────────────────────────────────────────────────────────────────


def why_unsupported(schema: Schema) -> str:
    """Return why samples of this schema cannot be written so that they come back as they were; "" if they can.

    >>> why_unsupported({"x": Field("array", "float32", (None,)), "x/shape": Field("text")})
    "the name 'x/shape' is taken by the shape of 'x'"
    """
    for name, field in schema.items():
        if name == MARK:
            return f"the name {MARK!r} is reserved for the schema of a record"
        if field.is_ragged and name + _SHAPE in schema:
            return f"the name {name + _SHAPE!r} is taken by the shape of {name!r}"
        try:
            name.encode()
        except UnicodeEncodeError:
            return f"the name {name!r} is no UTF-8"
    return stored_fields.why_unsupported(schema)


class SchemaEncoder:
    """Turns samples of one schema into Examples.

    Raises:
        SourceError: the schema is not supported.

    >>> from penstock.data.formats.tfrecord.example import parse_features
    >>> encoder = SchemaEncoder({"x": Field("array", "uint8", (None,))})
    >>> decode_sample(parse_features(encoder.example({"x": np.arange(3, dtype=np.uint8)})), Selection())
    {'x': array([0, 1, 2], dtype=uint8)}
    """

    def __init__(self, schema: Schema) -> None:
        why = why_unsupported(schema)
        if why:
            raise SourceError(f"this cannot be written as tf.train.Example: {why}")
        self._schema = schema
        self._mark = serialize_entry(MARK, [json.dumps(fields_to_json(schema), separators=(",", ":")).encode()])

    def example(self, sample: Sample) -> bytes:
        """Return the Example of one sample.

        Raises:
            SourceError: it does not fit the schema.
        """
        found = [self._mark]
        for name, value in fitted(self._schema, sample, "this file").items():
            field = self._schema[name]
            if field.dtype == "float32":
                found.append(serialize_entry(name, np.asarray(value, np.float32).ravel()))
            elif _is_integer(field):
                found.append(serialize_entry(name, [int(value)]))
            else:
                found.append(serialize_entry(name, [to_bytes(field, value)]))
            if field.is_ragged:
                found.append(serialize_entry(name + _SHAPE, value.shape))
        return wire_field(1, b"".join(found))


def _is_integer(field: Field) -> bool:
    return field.kind == "number" and field.dtype == "int64"


def decode_sample(features: Mapping[str, Values | None], fields: Selection) -> Sample:
    """Return the sample that lies in these features, of a record with the hidden one.

    Raises:
        ValueError: a feature is missing, or is not of the type in the schema.
    """
    mark = features[MARK] or []
    if len(mark) != 1 or not isinstance(mark[0], bytes):
        raise MalformedError(f"its feature {MARK} holds {len(mark)} values; it should be JSON")
    schema = _schema(mark[0])
    if fields.chosen is None:
        return {name: _value(features, name, field) for name, field in schema.items()}
    return {own: _value(features, name, schema[name]) for own, name in fields.names(schema, "it").items()}


@lru_cache(maxsize=64)
def _schema(text: bytes) -> Schema:
    try:
        return fields_from_json(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"its feature {MARK} cannot be understood: {error}") from error


def _value(features: Mapping[str, Values | None], name: str, field: Field) -> Any:
    values = features.get(name)
    if values is None:
        raise MalformedError(f"its field {name!r} is missing")
    data: Any = values
    if field.dtype == "float32":
        is_right = isinstance(values, np.ndarray) and values.dtype == np.float32
    else:
        data = values[0] if len(values) == 1 else None
        if _is_integer(field) and isinstance(data, int | np.int64):
            return np.int64(data)
        is_right = isinstance(data, bytes) and not _is_integer(field)
    if not is_right:
        raise MalformedError(f"its field {name!r} is no {field.words()}: {len(values)} values of another type")
    try:
        value = from_bytes(field, data, _shape(features, name, field))
    except ValueError as error:
        raise MalformedError(f"its field {name!r} cannot be read: {error}") from error
    return value.astype(field.dtype) if field.kind == "array" else value


def _shape(features: Mapping[str, Values | None], name: str, field: Field) -> tuple[Any, ...]:
    if not field.is_ragged:
        return field.shape
    found = features.get(name + _SHAPE)
    sizes: Values = [] if found is None else found
    shape = tuple(int(size) for size in sizes if isinstance(size, int | np.int64))
    is_other = any(size < 0 or wanted not in (None, size) for size, wanted in zip(shape, field.shape, strict=False))
    if not len(sizes) == len(shape) == len(field.shape) or is_other:
        raise ValueError(f"it has the impossible shape {shape[:32]}")
    return shape
