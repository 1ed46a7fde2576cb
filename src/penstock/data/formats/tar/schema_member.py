"""The schema in archives that penstock wrote, so that samples come back as they were written.

They begin with a comment (in a pax header, which other programs skip) of JSON: {"penstock": 1, "fields": {NAME: [kind,
dtype, shape]}, "suffixes": {NAME: suffix}}, the fields as in stored_fields.py. A field's member:

    text        NAME.txt
    bytes       NAME.bin, or the suffix that the writer was given
    integers    NAME.cls
    others      NAME.npy

NAME stands alone where it ends on such a suffix already. A text field `__key__` is the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats import stored_fields
from penstock.data.formats.images import image_codec
from penstock.data.formats.stored_fields import fields_from_json, fields_to_json
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
from penstock.data.schema import Field, Sample, Schema, Selection

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


class BySchema:
    """Makes samples of an archive that penstock wrote.

    Args:
        schema: of its samples.
        suffixes: of each field but `__key__`.
        fields: which fields a sample gets.
        decode: "images" makes pixels of bytes that a member with a picture's suffix holds.

    Raises:
        SourceError: it has no such fields.
    """

    def __init__(self, schema: Schema, suffixes: dict[str, str], fields: Selection, decode: Decode = True) -> None:
        self.schema = schema
        self.suffixes = suffixes
        self._decode = decode
        self._names = fields.names([*schema, KEY] if fields.chosen else schema, "it")
        self._wanted = frozenset(suffixes[name] for name in self._names.values() if name != KEY)

    @classmethod
    def from_comment(cls, text: str, fields: Selection, decode: Decode = True) -> BySchema | None:
        """Return what an archive's comment describes; None if penstock did not write it.

        Raises:
            SourceError: penstock wrote it, and it is damaged or of a later version; or it has no such fields.

        >>> comment = BySchema({"y": Field("text")}, {"y": "y.txt"}, Selection()).to_comment()
        >>> BySchema.from_comment(comment, Selection()).sample("0", {"y.txt": b"a"})
        {'y': 'a'}
        """
        if not text.startswith('{"penstock":'):
            return None
        try:
            found = json.loads(text)
            if found["penstock"] != _VERSION:
                raise SourceError(f"a later version of penstock wrote it: {found['penstock']}")
            schema = fields_from_json(found["fields"])
            suffixes = {name: str(found["suffixes"][name]) for name in schema if name != KEY}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise SourceError(f"its comment on its fields cannot be understood: {error}") from error
        return cls(schema, suffixes, fields, decode)

    def to_comment(self) -> str:
        """Return the archive's comment."""
        words = {"penstock": _VERSION, "fields": fields_to_json(self.schema), "suffixes": self.suffixes}
        return json.dumps(words, separators=(",", ":"))

    def wants(self, suffix: str) -> bool:
        """Return whether members with this suffix are read."""
        return suffix in self._wanted

    def sample(self, key: str, members: Mapping[str, bytes]) -> Sample:
        """Return a sample.

        Raises:
            SourceError: a member is missing, or is of another type than the schema states.
        """
        return {own: key if name == KEY else self._value(name, members) for own, name in self._names.items()}

    def _value(self, name: str, members: Mapping[str, bytes]) -> Any:
        suffix = self.suffixes[name]
        if suffix not in members:
            raise SourceError(f"its member {suffix!r} is missing")
        try:
            if self._decode == "images" and suffix.rpartition(".")[2].lower() in PICTURES:
                return image_codec.decode(members[suffix])
            return decode_member(self.schema[name], members[suffix])
        except (ValueError, OverflowError) as error:
            raise SourceError(f"its member {suffix!r} cannot be decoded: {error}") from error


def encode_member(field: Field, value: Any) -> bytes:
    """Return the bytes of a field's member.

    Raises:
        SourceError: a text is no UTF-8.

    >>> encode_member(Field("number", "int8"), -3)
    b'-3'
    """
    if field.kind in ("text", "bytes"):
        return stored_fields.to_bytes(field, value)
    if field.kind == "number" and field.dtype in _INTEGERS:
        return b"%d" % int(value)
    return encode_npy(value)


def decode_member(field: Field, data: bytes) -> Any:
    """Return what `encode_member` was given.

    Raises:
        ValueError: it is not that.
        OverflowError: an integer does not fit its dtype.
    """
    if field.kind in ("text", "bytes"):
        return stored_fields.from_bytes(field, data)
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
    if len(set(found.values())) < len(found):
        return f"two of the names {', '.join(map(repr, found))} give one member"
    if KEY in schema and schema[KEY].kind != "text":
        return f"{KEY} has to be text"
    return stored_fields.why_unsupported(schema)
