"""How a sample's fields lie in the members of a tar archive: WebDataset's conventions.

    train/0001.jpg      a member's key is its path up to the first dot of its name, "train/0001"; its suffix is what
    train/0001.cls      comes after that dot, "jpg". Members that follow one another and have one key are a sample:
    train/0001.seg.png  {"__key__": "train/0001", "jpg": ..., "cls": ..., "seg.png": ...}

Suffixes are lower case, however the archive has them. Members without a dot, with nothing before it, or whose path
begins with __NAME__ (metadata) are left out.

What a suffix ends on says what it holds:

    cls cls2 index inx id        an integer
    txt text transcript          text, UTF-8
    json jsn                     text; `parse_json=True` makes of it what it says. Of that, which may be anything, no
                                 batch can be made in general, and so it is not done unasked.
    npy                          an array of numbers; pickled objects are refused
    jpg jpeg png webp            bytes, as a picture's size is the decoder's business; `decode="images"` makes pixels of
                                 them, uint8[3, height, width], as `pictures` does
    anything else                bytes; pickles, too, which nobody should load
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.core.errors import SourceError
from penstock.feed.sources import npy, pictures
from penstock.feed.sources.sample import Sample, Selection

KEY = "__key__"
"""The field that is a sample's name."""

Decode = bool | Literal["images"]
"""What is made of members; see `BySuffix`."""

INTEGER = ("cls", "cls2", "index", "inx", "id")
TEXT = ("txt", "text", "transcript")
JSON = ("json", "jsn")
PICTURES = ("jpg", "jpeg", "png", "webp")
_METADATA = re.compile(r"__[^/]*__($|/)")


def split(name: str) -> tuple[str, str] | None:
    """Return the key and the suffix of a member's path; None where it belongs to no sample.

    >>> split("train/0001.seg.PNG"), split("README"), split("__meta__/a.json")
    (('train/0001', 'seg.PNG'), None, None)
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    if not dot or not stem or _METADATA.match(name) or (name.startswith("__") and name.endswith("__")):
        return None
    return folder + slash + stem, suffix


@dataclass(frozen=True, kw_only=True)
class BySuffix:
    """Makes samples of what suffixes say.

    Args:
        fields: which suffixes a sample gets; one may be several, of which the first that is there is taken: "jpg;png".
        decode: as the table above says, "images" with pictures; without it everything is bytes.
        parse_json: give what JSON says in place of its text.

    >>> BySuffix(fields=Selection.of({"y": "cls"})).sample("0001", {"cls": b"7"})
    {'y': 7}
    """

    fields: Selection
    decode: Decode = True
    parse_json: bool = False

    def wants(self, suffix: str) -> bool:
        """Say whether members with this suffix are looked at."""
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
                return integer(data)
            if ending in TEXT:
                return data.decode()
            if ending in JSON:
                return json.loads(data) if self.parse_json else data.decode()
            if ending in PICTURES and self.decode == "images":
                return pictures.decode(data)
            if ending == "npy":
                array = npy.unpacked(data)
                return array[()] if array.ndim == 0 else array
        except (ValueError, RecursionError) as error:  # SourceError is a ValueError
            raise SourceError(f"its member {suffix!r} cannot be decoded: {error}") from error
        return data


def integer(data: bytes) -> int:
    """Return the integer that some text says.

    Raises:
        ValueError: it says none, or none of 64 bits.

    >>> integer(b"-7")
    -7
    """
    value = int(data.decode("ascii"))
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"{value} does not fit into 64 bits")
    return value
