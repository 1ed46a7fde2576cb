"""One value of a sample as a line of text, in which nothing can control a terminal."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.schema import field_of, plain

_WIDTH = 72
_NUMBERS = 6
_BYTES = 12


def describe_value(value: Any) -> str:
    r"""Return a field's value as one line.

    >>> describe_value(np.arange(8.0)), describe_value("a\x1b[31m"), describe_value(b"\xff\xd8\xff")
    ('float64[8]: 0 1 2 3 4 5 ...', "'a\\x1b[31m'", '3 bytes: ff d8 ff')
    """
    try:
        value = plain(value)
    except SourceError:
        return _shorten(repr(value))
    if isinstance(value, np.ndarray):
        numbers = " ".join(
            f"{number:.4g}" if value.dtype.kind in "fc" else str(number) for number in value.flat[:_NUMBERS]
        )
        more = " ..." if value.size > _NUMBERS else ""
        return f"{field_of(value).words()}: {numbers}{more}".rstrip()
    if isinstance(value, np.generic):
        return f"{value.item()} ({value.dtype})"
    if isinstance(value, str):
        return _shorten(repr(value[: 4 * _WIDTH]))
    more = " ..." if len(value) > _BYTES else ""
    return f"{len(value)} bytes: {value[:_BYTES].hex(' ')}{more}".rstrip(": ")


def escape(text: str) -> str:
    r"""Return text unchanged if all of it can be printed, and quoted with escapes otherwise.

    >>> escape("é"), escape("a\nb")
    ('é', "'a\\nb'")
    """
    return text if text.isprintable() else repr(text)


def _shorten(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 4] + " ..."
