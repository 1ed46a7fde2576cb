"""The schema in archives that penstock wrote, so that samples come back as they were written.

They begin with a comment (in a pax header, which other programs skip) that lists the fields:
JSON {"penstock": 1, "count": samples, "numbered": keys are numbers of 9 digits, "fields": {NAME: [kind, dtype, shape,
suffix]}}. A field's member:

    text        NAME.txt
    bytes       NAME.bin, or the suffix that the writer was given
    integers    NAME.cls
    others      NAME.npy

NAME stands alone where it ends on such a suffix already. A text field `__key__` is the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats.images import image_codec
from penstock.data.formats.tar.fields import (
    INTEGER,
    JSON,
    KEY,
    PICTURES,
    TEXT,
    Decode,
    decode_npy,
    encode_npy,
    parse_integer,
)
from penstock.data.schema import Field, Sample, Schema, Selection, plain

_INTEGERS = {np.dtype(code).name for code in "bBhHiIqQ"}
_VERSION = 1


def member_suffix(name: str, field: Field, extension: str = "bin") -> str:
    """Return the suffix of the member that holds a field.

    >>> member_suffix("x", Field("array", "float32", (3,))), member_suffix("jpg", Field("bytes"), "jpg")
    ('x.npy', 'jpg')
    """
    if field.kind == "text":
        known: tuple[str, ...] = ("txt", *TEXT, *JSON)
    elif field.kind == "bytes":
        known = (extension, *PICTURES)
    elif field.kind == "number" and field.dtype in _INTEGERS:
        known = INTEGER
    else:
        known = ("npy",)
    return name if name.rpartition(".")[2].lower() in known else f"{name}.{known[0]}"


@dataclass(frozen=True)
class TarSchema:
    """The schema of an archive that penstock wrote, and how its samples are stored."""

    schema: Schema
    suffixes: dict[str, str]
    """Of each field but `__key__`."""
    count: int | None = None
    """How many samples; None if unknown."""

    @property
    def is_numbered(self) -> bool:
        """Whether keys are the numbers of samples, as without a field `__key__`."""
        return KEY not in self.schema

    def to_comment(self) -> str:
        """Return the archive's comment, of one length for any count: the count is filled in at the end."""
        fields = {
            name: [field.kind, field.dtype, field.shape, self.suffixes.get(name, "")]
            for name, field in self.schema.items()
        }
        rest = json.dumps({"numbered": self.is_numbered, "fields": fields}, separators=(",", ":"))
        count = "null" if self.count is None else str(self.count)
        return f'{{"penstock":{_VERSION},"count":{count:>12},{rest[1:]}'

    @classmethod
    def from_comment(cls, text: str) -> TarSchema | None:
        """Return the schema in a comment; None if penstock did not write it.

        Raises:
            SourceError: penstock wrote it, and it is damaged or of a later version.

        >>> layout = TarSchema({"y": Field("number", "int64")}, {"y": "y.cls"}, 3)
        >>> TarSchema.from_comment(layout.to_comment()) == layout
        True
        """
        if not text.startswith('{"penstock":'):
            return None
        try:
            found = json.loads(text)
            fields = {
                name: (Field(kind, dtype, tuple(shape)), suffix)
                for name, (kind, dtype, shape, suffix) in found["fields"].items()
            }
            count = found["count"]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SourceError(f"its comment on its fields cannot be understood: {error}") from error
        if found["penstock"] != _VERSION:
            raise SourceError(f"a later version of penstock wrote it: {found['penstock']}")
        for field, suffix in fields.values():
            are_texts = all(isinstance(word, str) for word in (field.dtype, suffix))
            if field.kind not in ("array", "number", "text", "bytes") or not are_texts:
                raise SourceError(f"its comment lists an impossible field {field}")
        if count is not None and (type(count) is not int or count < 0):
            raise SourceError(f"its comment lists {count} samples")
        schema = {name: field for name, (field, _) in fields.items()}
        return cls(schema, {name: suffix for name, (_, suffix) in fields.items() if name != KEY}, count)


class BySchema:
    """Makes samples of an archive that penstock wrote.

    Args:
        layout: the archive's schema.
        fields: which fields a sample gets.
        decode: "images" makes pixels of bytes that a member with a picture's suffix holds.

    Raises:
        SourceError: it has no such fields.
    """

    def __init__(self, layout: TarSchema, fields: Selection, decode: Decode = True) -> None:
        self._decode = decode
        self._schema = layout.schema
        self._suffixes = layout.suffixes
        self._names = fields.names([*layout.schema, KEY] if fields.chosen else layout.schema, "it")
        self._wanted = frozenset(layout.suffixes[name] for name in self._names.values() if name != KEY)

    def wants(self, suffix: str) -> bool:
        """Return whether members with this suffix are read."""
        return suffix in self._wanted

    def sample(self, key: str, members: Mapping[str, bytes]) -> Sample:
        """Return a sample.

        Raises:
            SourceError: a member is missing, or is of another type than the schema states.
        """
        sample: Sample = {}
        for own, name in self._names.items():
            if name == KEY:
                sample[own] = key
                continue
            data = members.get(self._suffixes[name])
            if data is None:
                raise SourceError(f"its member {self._suffixes[name]!r} is missing")
            try:
                is_picture = self._decode == "images" and self._suffixes[name].rpartition(".")[2].lower() in PICTURES
                sample[own] = image_codec.decode(data) if is_picture else decode_member(self._schema[name], data)
            except (ValueError, OverflowError) as error:
                raise SourceError(f"its member {self._suffixes[name]!r} cannot be decoded: {error}") from error
        return sample


def encode_member(field: Field, value: Any) -> bytes:
    """Return the bytes of a field's member.

    Raises:
        SourceError: a text is no UTF-8.

    >>> encode_member(Field("number", "int8"), -3)
    b'-3'
    """
    value = plain(value)
    if field.kind == "text":
        try:
            return bytes(value.encode())
        except UnicodeEncodeError as error:
            raise SourceError(f"a text is no UTF-8: {error}") from error
    if field.kind == "bytes":
        return bytes(value)
    if field.kind == "number" and field.dtype in _INTEGERS:
        return b"%d" % int(value)
    return encode_npy(value)


def decode_member(field: Field, data: bytes) -> Any:
    """Return what `encoded` was given.

    Raises:
        ValueError: it is not that.
        OverflowError: an integer does not fit its dtype.
    """
    if field.kind == "bytes":
        return data
    if field.kind == "text":
        return data.decode()
    if field.kind == "number" and field.dtype in _INTEGERS:
        return np.array(parse_integer(data), field.dtype)[()]
    array = decode_npy(data)
    shape = field.shape if field.kind == "array" else ()
    fits = array.ndim == len(shape) and all(size in (None, own) for size, own in zip(shape, array.shape, strict=True))
    if array.dtype.name != field.dtype or not fits:
        raise ValueError(f"it is {array.dtype.name}{list(array.shape)}; the schema states {field.words()}")
    return array[()] if field.kind == "number" else array


def why_unsupported(schema: Schema, suffixes: Mapping[str, str] | None = None) -> str:
    """Return why samples of this schema cannot be written so that they come back as they were; "" if they can.

    >>> why_unsupported({})
    'there are no fields, and so no members'
    """
    found = suffixes or {name: member_suffix(name, field) for name, field in schema.items() if name != KEY}
    if not found:
        return "there are no fields, and so no members"
    for name, suffix in found.items():
        if "/" in name or "\0" in name or not name.isprintable():
            return f"the name {name!r} cannot be part of a path"
        if len(suffix.encode()) > 80:
            return f"the name {name!r} is longer than 80 bytes"
        if schema[name].kind in ("array", "number") and np.dtype(schema[name].dtype).kind not in "biufc":
            return f"field {name!r} has the dtype {schema[name].dtype}"
    if len(set(found.values())) < len(found):
        return f"two of the names {', '.join(map(repr, found))} give one member"
    if KEY in schema and schema[KEY].kind != "text":
        return f"{KEY} has to be text"
    return ""
