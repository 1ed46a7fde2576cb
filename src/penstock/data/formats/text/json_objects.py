"""The object of a line of JSON: by orjson (the extra "jsonl") where that reads it as json does, else by json."""

from __future__ import annotations

import json
import re
from typing import Any

from penstock.core.errors import ExtraError
from penstock.data.optional import need


def parse_json(text: bytes) -> Any:
    """Return what some JSON says; of two members of one name the last.

    orjson makes a float of an integer that has more than 64 bits, and knows no NaN: such text is left to json.

    Raises:
        ValueError: what is wrong with it.

    >>> parse_json(b'{"x": [1, 2.5, NaN]}'), parse_json(b"18446744073709551616")
    ({'x': [1, 2.5, nan]}, 18446744073709551616)
    """
    if _orjson is not None and _LONG_NUMBER not in text.translate(_DIGITS_TO_0):
        try:
            return _orjson.loads(text)
        except ValueError:  # json says why, or knows it: NaN
            pass
    decoded = text.decode()
    found = json.loads(decoded)
    if "\\" in decoded and ("\\ud" in decoded or "\\uD" in decoded):
        json.dumps(found, ensure_ascii=False).encode()  # half of a pair of surrogates is no text
    return found


def check_object(found: Any) -> dict[str, Any]:
    """Return what is an object.

    Raises:
        ValueError: it is none.
    """
    if type(found) is not dict:
        raise ValueError(f"it holds {_WORDS.get(type(found), 'a number')}, not an object")
    return found


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
_LONG_NUMBER = b"0" * 19
_DIGITS_TO_0 = bytes.maketrans(b"123456789", b"000000000")
