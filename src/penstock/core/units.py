"""Sizes in bytes, as text and from text."""

import re

_UNITS = {"": 0, "B": 0, "KIB": 10, "MIB": 20, "GIB": 30, "TIB": 40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


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


def parse_size(text: str | int) -> int:
    """Return the bytes in `text`, as in "24GiB"; a number is one of bytes.

    Raises:
        ValueError: it is not a size.

    >>> parse_size("24GiB"), parse_size("1.5 MB"), parse_size(4096)
    (25769803776, 1500000, 4096)
    """
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    unit = found[2].upper() if found else ""
    if found is None or unit not in {*_UNITS, *_DECIMAL}:
        raise ValueError(f"{text!r} is not a size; write it as in 24GiB or 800MB")
    return int(float(found[1]) * (_DECIMAL.get(unit) or 1 << _UNITS[unit]))
