r"""How a sample's fields lie in the members of a tar archive: WebDataset's conventions.

    train/0001.jpg      a member's key is its path up to the first dot of its name, "train/0001"; its suffix is what
    train/0001.cls      comes after that dot, "jpg". Members that follow one another and have one key are a sample:
    train/0001.seg.png  {"__key__": "train/0001", "jpg": ..., "cls": ..., "seg.png": ...}

Suffixes are lower case, however the archive has them. Members without a dot are left out with a warning, or refused
where there are no others; those with nothing before it, or whose path begins with __NAME__ (metadata), are left out.

The last part of a suffix decides what the member holds:

    cls cls2 index inx id        an integer
    txt text transcript          text, UTF-8
    json jsn                     text; `parse_json=True` parses it. What comes out may be anything, which in general
                                 cannot be collated, and so this is not the default
    npy                          an array of numbers, as numpy.save writes it; structs and pickled objects are refused
    jpg jpeg png webp            bytes, as a picture's size is the decoder's business; `decode="images"` makes pixels of
                                 them, uint8[3, height, width], see `image_codec`
    anything else                bytes; pickles, too, which nobody should load

Archives that penstock wrote begin with a comment (in a pax header, which other programs skip) of JSON, {"penstock": 2,
"suffixes": {NAME: suffix}}: a sample then has the names of its fields. Text lies in NAME.txt, bytes in NAME.bin, an
int64 in NAME.cls and all else in NAME.npy; NAME stands alone where it ends on such a suffix already. A text `__key__`
is the key.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats import stored_fields
from penstock.data.formats.images import image_codec
from penstock.data.formats.npy_header import NBYTES, is_npy, read_header, write_header
from penstock.data.schema import Field, Sample, Schema, Selection

KEY = "__key__"
"""The field that is a sample's name."""

Decode = bool | Literal["images"]
"""What is made of members; see `BySuffix`."""

INTEGER = ("cls", "cls2", "index", "inx", "id")
TEXT = ("txt", "text", "transcript")
JSON = ("json", "jsn")
PICTURES = ("jpg", "jpeg", "png", "webp")
_METADATA = re.compile(r"__[^/]*__($|/)")
_VERSION = 2


def split_name(name: str) -> tuple[str, str] | None:
    """Return the key and the suffix of a member's path; None where it belongs to no sample.

    >>> split_name("train/0001.seg.PNG"), split_name("README"), split_name("__meta__/a.json")
    (('train/0001', 'seg.PNG'), None, None)
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    if not dot or not stem or _METADATA.match(name) or (name.startswith("__") and name.endswith("__")):
        return None
    return folder + slash + stem, suffix


def lacks_suffix(name: str) -> bool:
    """Return whether a member belongs to no sample for want of a suffix.

    >>> lacks_suffix("train/0001"), lacks_suffix("__meta__/a"), lacks_suffix("._0001.jpg")
    (True, False, False)
    """
    return "." not in name.rpartition("/")[2] and not _METADATA.match(name)


@dataclass(frozen=True, kw_only=True)
class BySuffix:
    """Makes samples of members by their suffixes.

    Args:
        fields: which suffixes a sample gets; one may be several, of which the first that is there is taken: "jpg;png".
        decode: as in the table above, "images" decodes images too; False leaves everything as bytes.
        parse_json: parse JSON; else it is text.
        as_numpy: make NumPy's int64 of integers, as penstock was given them.

    >>> BySuffix(fields=Selection.of({"y": "cls"})).sample("0001", {"cls": b"7"})
    {'y': 7}
    """

    fields: Selection
    decode: Decode = True
    parse_json: bool = False
    as_numpy: bool = False

    def of_archive(self, comment: str) -> BySuffix:
        """Return what makes samples of an archive with a comment: by the names of fields, if penstock wrote it.

        Raises:
            SourceError: penstock wrote it, and it is damaged or of another version; or it has no such fields.

        >>> by = BySuffix(fields=Selection()).of_archive(to_comment({"y": "y.txt"}))
        >>> by.sample("0", {"y.txt": b"a"})
        {'y': 'a'}
        """
        if not comment.startswith('{"penstock":'):
            return self
        try:
            found = json.loads(comment)
            if found["penstock"] != _VERSION:
                raise SourceError(f"another version of penstock wrote it: {str(found['penstock'])[:20]}")
            suffixes = {name: suffix.lower() for name, suffix in found["suffixes"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SourceError(f"its comment on its fields cannot be understood: {error}") from error
        names = self.fields.names([*suffixes, *([KEY] if self.fields.chosen else [])], "it")
        chosen = tuple((own, suffixes.get(name, name)) for own, name in names.items())
        return replace(self, fields=Selection(chosen), as_numpy=True)

    def wants(self, suffix: str) -> bool:
        """Return whether members with this suffix are read."""
        chosen = self.fields.chosen
        return chosen is None or any(suffix.lower() in own.split(";") for _, own in chosen)

    def sample(self, key: str, members: Mapping[str, bytes]) -> Sample:
        """Return a sample.

        Raises:
            SourceError: a member is missing, or cannot be decoded.
        """
        found = {suffix.lower(): data for suffix, data in members.items()}
        if len(found) < len(members):
            raise SourceError(f"two of its members have the same suffix: {', '.join(sorted(members))}")
        if self.fields.chosen is None:
            return {KEY: key, **{suffix: self._decoded(suffix, data) for suffix, data in found.items()}}
        sample: Sample = {}
        for name, own in self.fields.chosen:
            suffix = next((one for one in own.split(";") if one in found or one == KEY), None)
            if suffix is None:
                raise SourceError(f"it has no member {own!r}; `penstock inspect` shows which fields there are")
            sample[name] = key if suffix == KEY else self._decoded(suffix, found[suffix])
        return sample

    def _decoded(self, suffix: str, data: bytes) -> Any:
        if not self.decode:
            return data
        ending = suffix.rpartition(".")[2]
        try:
            if ending in INTEGER:
                return np.int64(parse_integer(data)) if self.as_numpy else parse_integer(data)
            if ending in TEXT:
                return data.decode()
            if ending in JSON:
                return json.loads(data) if self.parse_json else data.decode()
            if ending in PICTURES and self.decode == "images":
                return image_codec.decode(data)
            if ending == "npy":
                array = decode_npy(data)
                return array[()] if array.ndim == 0 else array
        except (ValueError, OverflowError, RecursionError) as error:  # SourceError is a ValueError
            raise SourceError(f"its member {suffix!r} cannot be decoded: {error}") from error
        return data


def parse_integer(data: bytes) -> int:
    """Return the integer that a text is.

    Raises:
        ValueError: it is none, or does not fit into 64 bits.

    >>> parse_integer(b"-7")
    -7
    """
    value = int(data.decode("ascii"))
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"{value} does not fit into 64 bits")
    return value


def to_comment(suffixes: Mapping[str, str]) -> str:
    """Return the comment of an archive that penstock writes, given the suffix of each field."""
    return json.dumps({"penstock": _VERSION, "suffixes": suffixes}, separators=(",", ":"))


def member_suffix(name: str, field: Field, extension: str = "bin") -> str:
    """Return the suffix of the member that holds a field; of `__key__`, which has none, the name.

    >>> member_suffix("x", Field("array", "float32", (3,))), member_suffix("jpg", Field("bytes"), "jpg")
    ('x.npy', 'jpg')
    """
    if name == KEY:
        return KEY
    if field.kind == "text":
        known: tuple[str, ...] = (*TEXT, *JSON)
    elif field.kind == "bytes":
        known = (extension, *PICTURES)
    else:
        known = INTEGER if (field.kind, field.dtype) == ("number", "int64") else ("npy",)
    return name if name.rpartition(".")[2].lower() in known else f"{name}.{known[0]}"


def encode_member(field: Field, value: Any) -> bytes:
    """Return the bytes of a field's member.

    Raises:
        SourceError: a text is no UTF-8.

    >>> encode_member(Field("number", "int64"), -3)
    b'-3'
    """
    if field.kind in ("text", "bytes"):
        return stored_fields.to_bytes(field, value)
    return b"%d" % int(value) if (field.kind, field.dtype) == ("number", "int64") else encode_npy(value)


def why_unsupported(schema: Schema, suffixes: Mapping[str, str] | None = None) -> str:
    """Return why samples of this schema cannot be written so that they come back as they were; "" if they can.

    >>> why_unsupported({})
    'there are no fields, and so no members'
    """
    found = suffixes or {name: member_suffix(name, field) for name, field in schema.items()}
    if not found.keys() - {KEY}:
        return "there are no fields, and so no members"
    for name, suffix in found.items():
        if "/" in name or ";" in name or not name.isprintable():
            return f"the name {name!r} cannot be part of a path, or of a choice of members"
        if len(suffix.encode()) > 80:
            return f"the name {name!r} is longer than 80 bytes"
        if schema[name].kind == "bytes" and suffix.rpartition(".")[2].lower() in (*INTEGER, *TEXT, *JSON, "npy"):
            return f"{suffix!r} would not hold bytes; choose another extension for {name!r}"
    if len({suffix.lower() for suffix in found.values()}) < len(found):
        return f"two of the names {', '.join(map(repr, found))} give one member"
    if KEY in schema and schema[KEY].kind != "text":
        return f"{KEY} has to be text"
    return stored_fields.why_unsupported(schema)


def encode_npy(value: np.ndarray | np.generic) -> bytes:
    """Return the bytes of an .npy file that holds an array or a number.

    >>> decode_npy(encode_npy(np.arange(3)))
    array([0, 1, 2])
    """
    array = np.asarray(value)
    array = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
    return write_header(array.dtype, array.shape) + array.tobytes()


def decode_npy(data: bytes) -> np.ndarray:
    """Return the array that these bytes of an .npy file hold, in the machine's byte order.

    numpy.load would allocate the shape that the header states before it looks at how many bytes follow.

    Raises:
        ValueError: they hold no array, or one of structs or objects.
    """
    if not is_npy(data) or len(data) < 12:
        raise ValueError(f"it is no .npy file: it begins with {data[:8]!r}")
    begins = 10 + int.from_bytes(data[8:10], "little") if data[6] == 1 else 12 + int.from_bytes(data[8:12], "little")
    begins, dtype, is_fortran, shape = read_header(data[: min(begins, NBYTES)])
    nbytes = math.prod(shape) * dtype.itemsize
    if len(data) - begins != nbytes:
        raise ValueError(f"its .npy file holds {len(data) - begins} bytes; shape {shape} of {dtype} takes {nbytes}")
    try:
        array: np.ndarray = np.ndarray(shape, dtype, data, begins, order="F" if is_fortran else "C")
    except (ValueError, OverflowError) as error:  # no bytes, and yet a dimension that is too large
        raise ValueError(f"its .npy file has the shape {shape}: {error}") from error
    return array.astype(dtype.newbyteorder("="), order="C")
