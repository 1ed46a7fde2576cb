"""Sizes as people read them."""


def size_text(nbytes: int) -> str:
    """Return `nbytes` in the unit that suits it.

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
    """Return the least multiple of `multiple` that is not below `value`.

    >>> round_up(65, 64)
    128
    """
    return -(-value // multiple) * multiple
