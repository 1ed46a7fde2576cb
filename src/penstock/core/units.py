"""Numbers that programs pass: sizes in bytes, as text and from text, and epochs."""

import operator
import re
from typing import Any

from penstock.core.errors import OptionError

_UNITS = {"": 0, "B": 0, "KIB": 10, "MIB": 20, "GIB": 30, "TIB": 40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

_LAST_EPOCH = 1 << 62
"""What counts on from there fits into the memory that processes share."""


def size_text(nbytes: int) -> str:
    """Return `nbytes` as text, in a unit of its magnitude.

    >>> size_text(100_663_296)
    '96.0 MiB'
    """
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`.

    >>> round_up(65, 64)
    128
    """
    return -(-value // multiple) * multiple


def to_nbytes(name: str, size: Any, *, least: int = 0) -> int:
    """Return the bytes of the argument `name`: a number, or text as in "24GiB".

    Raises:
        OptionError: it is not a size, or is smaller than `least`.

    >>> to_nbytes("budget", "24GiB"), to_nbytes("budget", "1.5 MB"), to_nbytes("budget", 4096)
    (25769803776, 1500000, 4096)
    """
    try:
        nbytes = _parse_size(size) if isinstance(size, str) else operator.index(size)
    except (TypeError, ValueError, OverflowError):  # text of so many digits is infinite
        nbytes = int(size) if isinstance(size, float) and size.is_integer() else -1
    if nbytes < least or isinstance(size, bool):
        bound = f" of at least {least} bytes" if least else ""
        raise OptionError(f"{name}: {size!r} is not a size{bound}; write it as in '24GiB', '800MB' or 4096")
    return nbytes


def _parse_size(text: str) -> int:
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", text)
    unit = found[2].upper() if found else ""
    if found is None or unit not in {*_UNITS, *_DECIMAL}:
        raise ValueError(text)
    return int(float(found[1]) * (_DECIMAL.get(unit) or 1 << _UNITS[unit]))


def to_epoch(epoch: Any) -> int:
    """Return the number of an epoch.

    Raises:
        OptionError: it is no whole number, negative, or too large.

    >>> to_epoch(3)
    3
    """
    try:
        number = operator.index(epoch)
    except TypeError:
        number = -1
    if not 0 <= number <= _LAST_EPOCH:
        raise OptionError(f"an epoch is a whole number of 0 or more, and at most {_LAST_EPOCH}, not {epoch!r}")
    return number
