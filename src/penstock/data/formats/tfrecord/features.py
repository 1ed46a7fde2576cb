"""How a sample's fields lie in the features of a tf.train.Example.

Files of others are read as they lie. A feature with one value is bytes, an int64 or a float32 number; with any other
number of values an int64 or float32 array, or a list of bytes.

In files that penstock wrote, a hidden feature `__penstock__` of each record lists its fields, so that samples come back
as they were. It is JSON, the same in every record of a file: {NAME: [kind, dtype, shape]}, as in `Field`.

    text             bytes, UTF-8
    bytes            bytes
    float32          a float list; arrays in C order
    an int64 number  an integer list
    anything else    the array's or the number's bytes, little-endian, in C order: what tf.io.decode_raw reads
    NAME/shape       of an array whose size differs from sample to sample: an integer list
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats.tfrecord.example import Values, serialize_entry
from penstock.data.formats.tfrecord.protobuf_wire import MalformedError
from penstock.data.formats.tfrecord.protobuf_wire import field as wire_field
from penstock.data.schema import Field, Sample, Schema, fitted

MARK = "__penstock__"
"""The feature with the schema of a record."""

_SHAPE = "/shape"
_NATIVE: dict[str, np.dtype] = {"f": np.dtype(np.float32), "i": np.dtype(np.int64)}
_DTYPES = {np.dtype(code).name: np.dtype(code) for code in "?bBhHiIqQefdgFDG"}
_MOST_DIMENSIONS = 64


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
        if field.kind in ("array", "number") and field.dtype not in _DTYPES:
            return f"field {name!r} has the dtype {field.dtype}"
        try:
            name.encode()
        except UnicodeEncodeError:
            return f"the name {name!r} is no UTF-8"
    return ""


class SchemaEncoder:
    """Turns samples of one schema into Examples.

    Args:
        schema: of the samples.

    Raises:
        SourceError: the schema is not supported.

    >>> from penstock.data.formats.tfrecord.example import parse_features
    >>> marked = SchemaEncoder({"x": Field("array", "uint8", (None,))})
    >>> sample = {"x": np.arange(3, dtype=np.uint8)}
    >>> features = parse_features(marked.example(sample))
    >>> SchemaDecoder.parse(features[MARK]).sample(features)
    {'x': array([0, 1, 2], dtype=uint8)}
    """

    def __init__(self, schema: Schema) -> None:
        why = why_unsupported(schema)
        if why:
            raise SourceError(f"this cannot be written as tf.train.Example: {why}")
        self._schema = schema
        words = {name: [field.kind, field.dtype, field.shape] for name, field in schema.items()}
        self._mark = serialize_entry(MARK, [json.dumps(words, separators=(",", ":")).encode()])

    def example(self, sample: Sample) -> bytes:
        """Return the Example of one sample.

        Raises:
            SourceError: it does not fit the schema.
        """
        found = [self._mark]
        for name, value in fitted(self._schema, sample, "this TFRecord file").items():
            field = self._schema[name]
            found.append(serialize_entry(name, _features_of(field, value)))
            if field.is_ragged:
                found.append(serialize_entry(name + _SHAPE, value.shape))
        return wire_field(1, b"".join(found))


def _features_of(field: Field, value: Any) -> Any:
    if field.kind == "text":
        try:
            return [value.encode()]
        except UnicodeEncodeError as error:
            raise SourceError(f"a text is no UTF-8: {error}") from error
    if field.kind == "bytes":
        return [value]
    if field.dtype == "float32":
        return np.asarray(value, np.float32).ravel()
    if field.kind == "number" and field.dtype == "int64":
        return [int(value)]
    return [np.ascontiguousarray(value, _DTYPES[field.dtype].newbyteorder("<")).tobytes()]


@dataclass(frozen=True, slots=True)
class SchemaDecoder:
    """Makes samples of records with a hidden feature."""

    schema: Schema

    @classmethod
    def parse(cls, values: Values) -> SchemaDecoder:
        """Return the decoder for a hidden feature with these values.

        Raises:
            MalformedError: it is damaged.
        """
        if len(values) != 1 or not isinstance(values[0], bytes):
            raise MalformedError(f"its feature {MARK} holds {len(values)} values; it should be JSON")
        return _marks(values[0])

    def sample(self, features: Mapping[str, Values], names: Mapping[str, str] | None = None) -> Sample:
        """Return the sample that lies in these features.

        Args:
            features: as they were parsed.
            names: {name in the sample: name in the file}; None for all.

        Raises:
            MalformedError: a feature is missing, or is not of the type in the schema.
        """
        if names is None:
            return {name: _value(features, name, field) for name, field in self.schema.items()}
        return {own: _value(features, name, self.schema[name]) for own, name in names.items()}


@lru_cache(maxsize=64)
def _marks(text: bytes) -> SchemaDecoder:
    try:
        words = json.loads(text)
        schema = {name: Field(kind, dtype, tuple(shape)) for name, (kind, dtype, shape) in words.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedError(f"its feature {MARK} cannot be understood: {error}") from error
    for field in schema.values():
        numbers = field.kind in ("array", "number")
        sizes = all(size is None or (type(size) is int and size >= 0) for size in field.shape)
        if field.kind not in ("array", "number", "text", "bytes") or not sizes:
            raise MalformedError(f"its feature {MARK} lists {field}")
        if numbers and str(field.dtype) not in _DTYPES:
            raise MalformedError(f"its feature {MARK} lists the dtype {field.dtype!r}")
    return SchemaDecoder(schema)


def _value(features: Mapping[str, Values], name: str, field: Field) -> Any:
    values = features.get(name)
    if values is None:
        raise MalformedError(f"its field {name!r} is missing")
    if field.kind == "array":
        return _array(values, name, field, _shape(features, name, field) if field.is_ragged else field.shape)
    if len(values) != 1:
        raise MalformedError(f"its field {name!r} has {len(values)} values; it should have one")
    value = values[0]
    if field.kind == "number":
        if field.dtype == "int64" and isinstance(value, int | np.int64):
            return np.int64(value)
        return _array(values, name, field, ())[()]
    if not isinstance(value, bytes):
        raise MalformedError(f"its field {name!r} should be {field.kind}, and is {type(value).__name__}")
    return _decoded(value) if field.kind == "text" else value


def _shape(features: Mapping[str, Values], name: str, field: Field) -> tuple[int, ...]:
    values = features.get(name + _SHAPE, [])
    shape = tuple(int(size) for size in values if isinstance(size, int | np.integer))
    fits = len(values) == len(shape) == len(field.shape) <= _MOST_DIMENSIONS and all(
        size >= 0 and wanted in (None, size) for size, wanted in zip(shape, field.shape, strict=True)
    )
    if not fits:
        raise MalformedError(f"its field {name!r} has the impossible shape {shape[:_MOST_DIMENSIONS]}")
    return shape


def _array(values: Values, name: str, field: Field, shape: tuple[Any, ...]) -> np.ndarray:
    dtype = _DTYPES[field.dtype]
    raw: Any = values if isinstance(values, np.ndarray) else values[0] if len(values) == 1 else None
    is_float = isinstance(values, np.ndarray) and values.dtype == np.float32
    if raw is None or (not is_float if field.dtype == "float32" else not isinstance(raw, bytes)):
        raise MalformedError(f"its field {name!r} is no {field.words()}")
    nbytes = raw.nbytes if isinstance(raw, np.ndarray) else len(raw)
    if nbytes != math.prod(shape) * dtype.itemsize:
        raise MalformedError(f"its field {name!r} has {nbytes} bytes for the shape {shape} of {field.dtype}")
    try:
        if isinstance(raw, np.ndarray):
            return raw.reshape(shape).astype(dtype)
        return np.ndarray(shape, dtype.newbyteorder("<"), raw).astype(dtype)
    except (ValueError, OverflowError) as error:  # no bytes, and yet a dimension that is too large, or too many
        raise MalformedError(f"its field {name!r} cannot have the shape {shape[:_MOST_DIMENSIONS]}: {error}") from error
