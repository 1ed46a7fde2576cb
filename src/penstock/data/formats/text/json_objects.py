"""The object of a line of JSON: by orjson (the extra "jsonl") where that reads it as json does, else by json."""

from __future__ import annotations

import json
import re
from typing import Any

from penstock.core.errors import ExtraError
from penstock.data.optional import need


def parse_object(line: bytes) -> dict[str, Any]:
    """Return the object of a line.

    Raises:
        ValueError: what is wrong with it.
    """
    text = line.decode().strip(" \t\r\n")
    try:
        try:
            members, end = _scan(text, 0)
        except _RepeatedNameError:
            pairs, _ = _scan_pairs(text, 0)
            raise ValueError(f"the field {_find_repeated(pairs, '')!r} is there twice") from None
    except StopIteration as error:
        raise json.JSONDecodeError("Expecting value", text, error.value) from None
    if end != len(text):
        raise ValueError(f"more text follows {end} characters of JSON")
    if type(members) is not dict:
        raise ValueError(f"it holds {_WORDS.get(type(members), 'a number')}, not an object")
    if "\\" in text and ("\\ud" in text or "\\uD" in text):
        json.dumps(members, ensure_ascii=False).encode()  # half of a pair of surrogates is no text
    return members


class _RepeatedNameError(ValueError):
    """An object has two members of one name."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _RepeatedNameError
    return found


def _find_repeated(value: Any, before: str) -> str:
    """Return the field that is there twice in a value whose objects are tuples of members; "" if none is."""
    if type(value) is list:
        return next(filter(None, (_find_repeated(one, before) for one in value)), "")
    names: set[str] = set()
    for own, one in value if type(value) is tuple else ():
        found = before + own if own in names else _find_repeated(one, f"{before}{own}/")
        if found:
            return found
        names.add(own)
    return ""


_scan = json.JSONDecoder(object_pairs_hook=_object).scan_once  # type: ignore[attr-defined]  # typeshed lacks it
"""From JSON and a place in it to the value there, and where that ends; raises StopIteration where none is."""

_scan_pairs = json.JSONDecoder(object_pairs_hook=tuple).scan_once  # type: ignore[attr-defined]
"""The same, with a tuple of its members for each object."""

_WORDS = {list: "a list", str: "a text", bool: "a bool", type(None): "null"}


def _usable_orjson() -> Any:
    """Return orjson; None where it is not installed, or ends the process over deep lists (CVE-2024-27454)."""
    try:
        orjson = need("orjson", "jsonl")
    except ExtraError:
        return None
    version = tuple(map(int, re.findall(r"\d+", orjson.__version__)[:3]))
    return orjson if version >= (3, 9, 15) else None


_orjson = _usable_orjson()


def quick_object(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line by orjson; None where it is not known to read it as `parse_object` does.

    orjson makes a float of an integer that has more than 64 bits, and takes the last of two members of one name. So
    there must be no number of 19 digits, and as many members as there are colons, or colons after a quote. (It also
    knows short names again by a hash of 64 bits: only a file that was made for it has two names of one.)
    """
    if _orjson is None or _LONG_NUMBER in line.translate(_DIGITS_TO_0):
        return None
    try:
        found = _orjson.loads(line)
    except ValueError:  # `parse_object` says why, or knows it: NaN
        return None
    if type(found) is not dict:
        return None
    colons = line.count(b":")
    if colons != len(found):
        members = _count_members(found)
        if colons != members and (line.count(b'":') != members or _QUOTE_SPACE_COLON.search(line)):
            return None
    return found


def _count_members(value: Any) -> int:
    kind = type(value)
    if kind is dict:
        return len(value) + sum(map(_count_members, value.values()))
    if kind is list and value and type(value[0]) not in (int, float):
        return sum(map(_count_members, value))
    return 0


_LONG_NUMBER = b"0" * 19
_DIGITS_TO_0 = bytes.maketrans(b"123456789", b"000000000")
_QUOTE_SPACE_COLON = re.compile(rb'"[ \t\r\n]+:')
