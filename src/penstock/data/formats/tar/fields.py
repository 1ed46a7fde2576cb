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
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.formats.images import image_codec
from penstock.data.formats.npy_header import NBYTES, is_npy, read_header, write_header
from penstock.data.schema import Sample, Selection

KEY = "__key__"
"""The field that is a sample's name."""

Decode = bool | Literal["images"]
"""What is made of members; see `BySuffix`."""

INTEGER = ("cls", "cls2", "index", "inx", "id")
TEXT = ("txt", "text", "transcript")
JSON = ("json", "jsn")
PICTURES = ("jpg", "jpeg", "png", "webp")
_METADATA = re.compile(r"__[^/]*__($|/)")


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

    >>> BySuffix(fields=Selection.of({"y": "cls"})).sample("0001", {"cls": b"7"})
    {'y': 7}
    """

    fields: Selection
    decode: Decode = True
    parse_json: bool = False

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
                return parse_integer(data)
            if ending in TEXT:
                return data.decode()
            if ending in JSON:
                return json.loads(data) if self.parse_json else data.decode()
            if ending in PICTURES and self.decode == "images":
                return image_codec.decode(data)
            if ending == "npy":
                array = decode_npy(data)
                return array[()] if array.ndim == 0 else array
        except (ValueError, RecursionError) as error:  # SourceError is a ValueError
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
