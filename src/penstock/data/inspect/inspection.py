"""The result of an inspection, as data, as JSON (`penstock.inspect/1`) and as text.

What files hold is escaped in the text, so that it cannot control a terminal.
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.core.units import size_text
from penstock.core.urls import redact
from penstock.data.inspect.field_summary import FieldSummary
from penstock.data.schema import Sample, field_of, plain

_WIDTH = 72
_NUMBERS = 6
_BYTES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What was found at a path."""

    path: str
    format: str
    files: int
    nbytes: int
    """Of the files."""
    samples: int | None
    """None where only reading all of them would count them."""
    is_stream: bool
    """Whether samples can only be read in order."""
    chunks: int | None
    """Chunks or row groups: samples that are read together."""
    samples_read: int
    """Samples that `fields` describes."""
    fields: dict[str, FieldSummary]
    examples: list[Sample]
    """Some samples."""
    errors: list[str]
    """Errors of the first few records that could not be read."""
    notes: list[str]
    """How labels were made, and what was left out."""

    def to_json(self) -> dict[str, Any]:
        """Return the inspection as JSON, with the examples' values as text."""
        return {
            "schema": "penstock.inspect/1",
            **{one.name: getattr(self, one.name) for one in dataclasses.fields(self)},
            "path": redact(self.path),
            "fields": {name: asdict(summary) for name, summary in self.fields.items()},
            "examples": [{name: describe_value(value) for name, value in sample.items()} for sample in self.examples],
        }


def render(inspection: Inspection) -> str:
    """Return the report, some lines of plain text."""
    one = inspection
    count = "unknown without reading" if one.samples is None else str(one.samples)
    files = f"{one.files} file{'s' if one.files != 1 else ''}"
    access = "read in order" if one.is_stream else "random access"
    lines = [
        f"{escape(redact(one.path))}: {one.format}, {files}, {size_text(one.nbytes)}, {access}",
        f"  samples: {count}",
    ]
    lines += [f"  {escape(note)}" for note in one.notes]
    if one.chunks:
        per_chunk = (one.samples or 0) / one.chunks
        lines.append(f"  chunks: {one.chunks} (or row groups; about {per_chunk:.0f} samples each)")
    if one.fields:
        lines.append(f"fields, in {one.samples_read} samples:")
        width = max(len(escape(name)) for name in one.fields)
        lines += [f"  {escape(name):<{width}}  {_field_text(field, one)}" for name, field in one.fields.items()]
    for number, sample in enumerate(one.examples):
        lines.append("samples:" if not number else "")
        lines += [f"  {escape(name)}: {describe_value(value)}" for name, value in sample.items()]
    lines += [f"broken: {escape(error)}" for error in one.errors]
    return "\n".join(lines) + "\n"


def _field_text(field: FieldSummary, inspection: Inspection) -> str:
    parts = [" or ".join(field.types)]
    if field.mean is not None:
        parts.append(f"{field.min:.6g} to {field.max:.6g}, mean {field.mean:.6g}")
    if field.nonfinite:
        parts.append(f"{field.nonfinite} not finite")
    if field.lengths is not None:
        low, high = field.lengths
        unit = "characters" if field.types == ["text"] else "bytes"
        parts.append(f"{low} {unit}" if low == high else f"{low} to {high} {unit}")
    if field.samples != inspection.samples_read:
        parts.append(f"in {field.samples} samples")
    return ", ".join(parts)


# ── one value ───────────────────────────────────────────────────────────────────────────────────────────────


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
