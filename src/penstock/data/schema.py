"""Samples are dicts of fields; a schema is the type of each field.

    array    a NumPy array of one dtype; a dimension that differs from sample to sample is None in the shape
    number   a NumPy scalar (or bool, int, float of Python, which are bool, int64 and float64)
    text     str
    bytes    bytes: encoded images, or anything else that a decoder reads
    object   what is none of these, as Python has it: lists of text, dicts, Decimal. Only some formats give them

Parquet and Arrow give None for text, bytes and objects that are null.

torch's default_collate, and penstock's, make tensors of arrays and numbers, and lists of text and bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from penstock.core.errors import SourceError

Sample = dict[str, Any]
Kind = Literal["array", "number", "text", "bytes", "object"]
Errors = Literal["raise", "skip"]
"""What to do with a record that is broken."""

_NUMBERS = "biufc"

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
"""Of numbers and arrays in formats of NumPy's types."""


@dataclass(frozen=True, slots=True)
class Field:
    """What one field holds."""

    kind: Kind
    """array, number, text, bytes or object."""

    dtype: str = ""
    """NumPy's name for it, as in "float32"; empty for text, bytes and objects."""

    shape: tuple[int | None, ...] = ()
    """Of arrays; None where samples differ."""

    unit: str = ""
    """What the file says of its values beyond their dtype, as in "timestamp[us, tz=UTC]"; of objects, what they are."""

    @property
    def is_ragged(self) -> bool:
        """Whether samples differ in shape."""
        return None in self.shape

    def words(self) -> str:
        """Return it as text, as in "float32[3, ?, ?]".

        >>> Field("array", "float32", (3, None)).words(), Field("number", "int32", unit="date32[day]").words()
        ('float32[3, ?]', 'int32 (date32[day])')
        """
        words = self.dtype if self.kind == "number" else self.kind
        if self.kind == "array":
            words = f"{self.dtype}[{', '.join('?' if size is None else str(size) for size in self.shape)}]"
        return f"{words} ({self.unit})" if self.unit else words

    def nbytes(self) -> int:
        """Return the bytes of one; 0 where samples differ."""
        if self.kind in ("text", "bytes", "object") or self.is_ragged:
            return 0
        return int(np.prod([size or 0 for size in self.shape], dtype=np.int64)) * np.dtype(self.dtype).itemsize


Schema = dict[str, Field]


def common_dtype(one: str, other: str) -> str:
    """Return the dtype that holds the numbers of two exactly; "" if there is none.

    >>> common_dtype("float32", "float64"), common_dtype("int32", "float32"), common_dtype("int64", "float64")
    ('float64', 'float64', '')
    """
    if "bool" in (one, other):
        return one if one == other else ""
    wide = np.result_type(one, other)
    for dtype in map(np.dtype, (one, other)):
        if dtype.kind in "iu" and wide.kind in "fc" and np.iinfo(dtype).max > 2 ** (np.finfo(wide).nmant + 1):
            return ""
    return wide.name


def plain(value: Any) -> Any:
    """Return a field's value as array, NumPy scalar, str or bytes.

    Raises:
        SourceError: it is none of these.

    >>> plain(3), plain(torch.zeros(2)), plain("a")
    (np.int64(3), array([0., 0.], dtype=float32), 'a')
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
        return value[()] if value.ndim == 0 else value
    if isinstance(value, np.ndarray) and value.dtype.kind in _NUMBERS:
        return value[()] if value.ndim == 0 else value
    if isinstance(value, np.generic) and value.dtype.kind in _NUMBERS:
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, bool | int | float | complex):
        try:
            return np.asarray(value)[()] if not isinstance(value, int) or isinstance(value, bool) else np.int64(value)
        except OverflowError as error:
            raise SourceError(f"it holds the integer {value}, which does not fit into 64 bits") from error
    found = "None" if value is None else type(value).__qualname__
    raise SourceError(f"it holds {found}; it has to be an array or a tensor of numbers, a number, str or bytes")


def field_of(value: Any) -> Field:
    """Return what a field must be to hold `value`.

    >>> field_of(np.zeros((2, 3), np.uint8)).words()
    'uint8[2, 3]'
    """
    value = plain(value)
    if isinstance(value, np.ndarray):
        return Field("array", value.dtype.newbyteorder("=").name, value.shape)
    if isinstance(value, np.generic):
        return Field("number", value.dtype.newbyteorder("=").name)
    return Field("text" if isinstance(value, str) else "bytes")


def schema_of(sample: Mapping[str, Any], where: str = "the source") -> Schema:
    """Return the schema of one sample of the source `where`.

    Raises:
        SourceError: a field has no type that others could share.

    >>> schema_of({"x": 1, "note": None}, "a.jsonl")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    penstock.core.errors.SourceError: a.jsonl: field 'note': it holds None; ...
    """
    schema = {}
    for name, value in sample.items():
        try:
            schema[name] = field_of(value)
        except SourceError as error:
            raise SourceError(
                f"{where}: field {name!r}: {error}: choose other fields with fields= (--fields a,new=old)"
            ) from error
    return schema


def merge_schemas(one: Schema, other: Schema, where: str) -> Schema:
    """Return a schema wide enough for both.

    Raises:
        SourceError: they differ in more than sizes.

    >>> merge_schemas({"x": Field("array", "int8", (2,))}, {"x": Field("array", "int8", (3,))}, "data")["x"].words()
    'int8[?]'
    """
    if one.keys() != other.keys():
        raise SourceError(
            f"{where}: samples have the fields {sorted(one)} and {sorted(other)}; all need the same: choose with "
            "fields= (--fields a,b)"
        )
    wide = dict(one)
    for name, old in one.items():
        new = other[name]
        if (old.kind, old.dtype, len(old.shape)) != (new.kind, new.dtype, len(new.shape)):
            raise SourceError(f"{where}: field {name!r} is {new.words()} in one sample and {old.words()} in another")
        sizes = (size if size == found else None for size, found in zip(old.shape, new.shape, strict=True))
        wide[name] = replace(old, shape=tuple(sizes))
    return wide


def fitted(schema: Schema, sample: Mapping[str, Any], where: str) -> Sample:
    """Return the plain values of a sample that a writer of `schema` was given, in the schema's order.

    Raises:
        SourceError: it has other fields, or another type or size in one of them.

    >>> schema = {"x": Field("array", "uint8", (None,)), "y": Field("text")}
    >>> fitted(schema, {"y": "a", "x": torch.zeros(2).byte()}, "out.tar")
    {'x': array([0, 0], dtype=uint8), 'y': 'a'}
    """
    if sample.keys() != schema.keys():
        raise SourceError(f"{where}: a sample has the fields {sorted(sample)}, not {sorted(schema)}")
    values: Sample = {}
    for name, field in schema.items():
        try:
            values[name] = plain(sample[name])
        except SourceError as error:
            raise SourceError(f"{where}: field {name!r}: {error}") from error
        found = field_of(values[name])
        fits = (found.kind, found.dtype, len(found.shape)) == (field.kind, field.dtype, len(field.shape))
        if not fits or any(size not in (None, own) for size, own in zip(field.shape, found.shape, strict=True)):
            raise SourceError(f"{where}: field {name!r} is {found.words()}, and has to be {field.words()}")
    return values


@dataclass(frozen=True, slots=True)
class Selection:
    """Which fields a sample gets, and under what names: `fields=` of `penstock.open`.

    >>> selection = Selection.of({"image": "x"})
    >>> selection.names(["x", "y"]), Selection.of(["y"]).names(["x", "y"]), Selection.of(None).names(["x"])
    ({'image': 'x'}, {'y': 'y'}, {'x': 'x'})
    """

    chosen: tuple[tuple[str, str], ...] | None = None

    @classmethod
    def of(cls, fields: Mapping[str, str] | list[str] | tuple[str, ...] | None) -> Selection:
        """Return the selection of {name in the sample: name in the file}, of names, or of all fields (None)."""
        if fields is None:
            return cls()
        pairs = fields.items() if isinstance(fields, Mapping) else ((name, name) for name in fields)
        return cls(tuple(pairs))

    def names(self, there: Any, where: str = "the source") -> dict[str, str]:
        """Return {name in the sample: name in the file}, given the names in the file, `there`.

        Raises:
            SourceError: a field is missing.
        """
        known = list(there)
        if self.chosen is None:
            return {name: name for name in known}
        for _, name in self.chosen:
            if name not in known:
                raise SourceError(f"{where} has no field {name!r}; it has {', '.join(map(repr, known)) or 'none'}")
        return dict(self.chosen)
