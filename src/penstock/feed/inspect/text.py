"""An inspection as text: data in, lines out. What files hold is escaped: it cannot steer a terminal."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.core.units import size_text
from penstock.feed.inspect.look import FieldSeen, Inspection
from penstock.feed.inspect.speed import Speed
from penstock.feed.sources.sample import field_of, plain

_WIDE = 72
_NUMBERS = 6


def render(found: Inspection) -> str:
    """Return the report, some lines of plain text."""
    count = "unknown without reading" if found.samples is None else str(found.samples)
    files = f"{found.files} file{'s' if found.files != 1 else ''}"
    way = "read in order" if found.is_stream else "random access"
    lines = [
        f"{clean(found.path)}: {found.format}, {files}, {size_text(found.nbytes)}, {way}",
        f"  samples: {count}",
    ]
    if found.runs:
        lines.append(
            f"  runs: {found.runs} (chunks or row groups, about {(found.samples or 0) / found.runs:.0f} samples each)"
        )
    lines += [f"  {clean(name)}: {clean(words)}" for name, words in found.layout.items()]
    if found.fields:
        lines.append(f"fields, in {found.looked_at} samples:")
        width = max(len(clean(name)) for name in found.fields)
        lines += [f"  {clean(name):<{width}}  {_field(seen, found)}" for name, seen in found.fields.items()]
    for number, sample in enumerate(found.shown):
        lines.append("samples:" if not number else "")
        lines += [f"  {clean(name)}: {told(value)}" for name, value in sample.items()]
    lines += [f"broken: {clean(words)}" for words in found.broken]
    if found.speeds:
        lines.append("read speed, one thread (what the page cache held came from there):")
        lines += [_speed(speed) for speed in found.speeds]
    return "\n".join(lines) + "\n"


def _field(seen: FieldSeen, found: Inspection) -> str:
    words = [" or ".join(seen.types)]
    if seen.mean is not None:
        words.append(f"{seen.least:.6g} to {seen.most:.6g}, mean {seen.mean:.6g}")
    if seen.not_finite:
        words.append(f"{seen.not_finite} not finite")
    if seen.sizes is not None:
        low, high = seen.sizes
        unit = "characters" if seen.types == ["text"] else "bytes"
        words.append(f"{low} {unit}" if low == high else f"{low} to {high} {unit}")
    if seen.samples != found.looked_at:
        words.append(f"in {seen.samples} samples")
    return ", ".join(words)


def _speed(speed: Speed) -> str:
    broken = f", {speed.broken} broken" if speed.broken else ""
    return (
        f"  {speed.order:<10}  {speed.samples_per_s:.0f} samples/s, {speed.nbytes_per_s / 1e6:.1f} MB/s"
        f" ({speed.samples} samples in {speed.seconds:.2f} s{broken})"
    )


def told(value: Any) -> str:
    r"""Return a field's value in a line.

    >>> told(np.arange(8.0)), told("a\x1b[31m"), told(b"\xff\xd8\xff")
    ('float64[8]: 0 1 2 3 4 5 ...', "'a\\x1b[31m'", '3 bytes: ff d8 ff')
    """
    try:
        value = plain(value)
    except SourceError:
        return _short(repr(value))
    if isinstance(value, np.ndarray):
        numbers = " ".join(
            f"{number:.4g}" if value.dtype.kind in "fc" else str(number) for number in value.flat[:_NUMBERS]
        )
        more = " ..." if value.size > _NUMBERS else ""
        return f"{field_of(value).words()}: {numbers}{more}".rstrip()
    if isinstance(value, np.generic):
        return f"{value.item()} ({value.dtype})"
    if isinstance(value, str):
        return _short(ascii_escaped(value))
    more = " ..." if len(value) > 12 else ""
    return f"{len(value)} bytes: {value[:12].hex(' ')}{more}".rstrip(": ")


def ascii_escaped(text: str) -> str:
    """Return text in quotes, without control characters; letters of all scripts stay."""
    return repr(text[: 4 * _WIDE])


def clean(text: str) -> str:
    r"""Return text as it is where it can be printed, and escaped where not.

    >>> clean("é"), clean("a\nb")
    ('é', "'a\\nb'")
    """
    return text if text.isprintable() else repr(text)


def _short(text: str) -> str:
    return text if len(text) <= _WIDE else text[: _WIDE - 4] + " ..."
