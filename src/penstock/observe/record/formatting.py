"""Formats figures for people: percentages, rates, durations, ratios."""

from __future__ import annotations

import contextlib
import math
import os
import textwrap
from collections.abc import Sequence
from typing import TextIO

_NARROW = 40
"""No text is broken for a terminal with fewer columns."""


def wrapped(text: str, stream: TextIO) -> str:
    """Return lines of text broken at the width of `stream`, if that is a terminal; what is broken off stands indented.

    >>> import io
    >>> wrapped("  a line", io.StringIO())
    '  a line'
    """
    width = 0
    with contextlib.suppress(OSError, ValueError):  # closed, or without a file
        if stream.isatty():
            width = os.get_terminal_size(stream.fileno()).columns
    return text if width < _NARROW else wrapped_at(text, width)


def wrapped_at(text: str, width: int) -> str:
    """Return lines of text, none longer than `width` unless a word is.

    >>> print(wrapped_at("  num_workers=3, or make samples cheaper", 24))
      num_workers=3, or make
          samples cheaper
    """
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        lines += (
            [line]
            if len(line) <= width
            else textwrap.wrap(
                line,
                width,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
                replace_whitespace=False,
                drop_whitespace=True,
            )
        )
    return "\n".join(lines)


def percent_text(fraction: float) -> str:
    """Return a fraction between 0 and 1 in per cent; near 0 and 1 with one more digit, so that two add up to 100.

    >>> percent_text(0.372), percent_text(0.012), percent_text(0.988), percent_text(0.0)
    ('37 %', '1.2 %', '98.8 %', '0 %')
    """
    return percent_texts([1 - fraction, fraction])[1]


def percent_digits(fraction: float) -> int:
    """Return how many digits after the point `percent_text` shows of a fraction."""
    return int(0 < fraction < 0.1 or 0.9 < fraction < 1)


def percent_texts(fractions: Sequence[float], digits: int | None = None) -> list[str]:
    """Return fractions that are shown together, rounded so that the texts add up to that of their sum.

    Args:
        fractions: each between 0 and 1, and so their sum.
        digits: how many to show after the point; by default as many as `percent_text` does of one of them.

    >>> percent_texts([1 / 3, 1 / 3, 1 / 3]), percent_texts([0.9277, 0.0723])
    (['34 %', '33 %', '33 %'], ['92.8 %', '7.2 %'])
    """
    digits = max(map(percent_digits, fractions), default=0) if digits is None else digits
    scale = 100 * 10**digits
    shown = [math.floor(fraction * scale) for fraction in fractions]
    # Where rounding down has taken most, one is added: the method of largest remainders.
    by_remainder = sorted(range(len(shown)), key=lambda k: shown[k] - fractions[k] * scale)
    for k in by_remainder[: round(sum(fractions) * scale) - sum(shown)]:
        shown[k] += 1
    return [
        _percent(units / 10**digits, digits, is_nothing=not fraction, is_all=fraction == 1)
        for units, fraction in zip(shown, fractions, strict=True)
    ]


def _percent(percent: float, digits: int, *, is_nothing: bool, is_all: bool) -> str:
    text = f"{percent:.{digits}f}"
    least = 10**-digits
    if float(text) == 0:
        return "0 %" if is_nothing else f"under {least:g} %"
    if float(text) == 100:
        return "100 %" if is_all else f"over {100 - least:g} %"
    return f"{text} %"


def rate_text(samples_per_s: float) -> str:
    """Return samples per second, with a space between thousands.

    >>> rate_text(17123.4), rate_text(0.25)
    ('17 123 samples/s', '0.25 samples/s')
    """
    return f"{count_text(samples_per_s)} samples/s"


def count_text(count: float) -> str:
    """Return a number with a space between thousands; a fraction below 10 with two digits.

    >>> count_text(1234567), count_text(3.14159), count_text(0)
    ('1 234 567', '3.1', '0')
    """
    if count != int(count) and abs(count) < 10:
        return f"{count:.2g}"
    return f"{count:,.0f}".replace(",", " ")


def uploads_text(batches: int, copy_wait_s: float | None) -> str:
    """Return how many batches were copied to a device, and how long it waited for them.

    >>> uploads_text(1200, 0.00002), uploads_text(3, None)
    ('1 200 batches; the GPU waited 0.02 ms a step for copies', '3 batches')
    """
    waited = "" if copy_wait_s is None else f"; the GPU waited {copy_wait_s * 1e3:.2f} ms a step for copies"
    return f"{count_text(batches)} batches{waited}"


def time_text(seconds: float) -> str:
    """Return a duration in the unit that suits its size.

    >>> [time_text(seconds) for seconds in (0.0000123, 0.0544, 5.25, 75.0, 7384.0, 93784.0)]
    ['12 µs', '54 ms', '5.2 s', '1 min 15 s', '2 h 3 min', '1 d 2 h']
    """
    if seconds < 0.0005:
        return f"{seconds * 1e6:.0f} µs" if seconds else "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.00995 else f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def ratio_text(ratio: float) -> str:
    """Return a ratio of two figures.

    >>> ratio_text(1.5), ratio_text(0.251), ratio_text(12.4), ratio_text(float("inf"))
    ('1.50×', '0.25×', '12×', '–')
    """
    if not math.isfinite(ratio):
        return "–"
    return f"{ratio:.0f}×" if ratio >= 10 else f"{ratio:.2f}×"
