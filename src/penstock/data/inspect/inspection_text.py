"""An inspection as lines of text. What files hold is escaped, so that it cannot control a terminal."""

from __future__ import annotations

from penstock.core.units import size_text
from penstock.data.inspect.field_summary import FieldSummary
from penstock.data.inspect.inspection import Inspection
from penstock.data.inspect.read_speed import ReadSpeed
from penstock.data.inspect.value_text import describe_value, escape


def render(inspection: Inspection) -> str:
    """Return the report, some lines of plain text."""
    one = inspection
    count = "unknown without reading" if one.samples is None else str(one.samples)
    files = f"{one.files} file{'s' if one.files != 1 else ''}"
    access = "read in order" if one.is_stream else "random access"
    lines = [
        f"{escape(one.path)}: {one.format}, {files}, {size_text(one.nbytes)}, {access}",
        f"  samples: {count}",
    ]
    if one.chunks:
        per_chunk = (one.samples or 0) / one.chunks
        lines.append(f"  chunks: {one.chunks} (or row groups; about {per_chunk:.0f} samples each)")
    lines += [f"  {escape(name)}: {escape(layout)}" for name, layout in one.layout.items()]
    if one.fields:
        lines.append(f"fields, in {one.samples_read} samples:")
        width = max(len(escape(name)) for name in one.fields)
        lines += [f"  {escape(name):<{width}}  {_field_text(field, one)}" for name, field in one.fields.items()]
    for number, sample in enumerate(one.examples):
        lines.append("samples:" if not number else "")
        lines += [f"  {escape(name)}: {describe_value(value)}" for name, value in sample.items()]
    lines += [f"broken: {escape(error)}" for error in one.errors]
    if one.speeds:
        lines.append("read speed, one thread (including reads from the page cache):")
        lines += [_speed_text(speed) for speed in one.speeds]
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


def _speed_text(speed: ReadSpeed) -> str:
    errors = f", {speed.errors} broken" if speed.errors else ""
    return (
        f"  {speed.order:<10}  {speed.samples_per_s:.0f} samples/s, {speed.nbytes_per_s / 1e6:.1f} MB/s"
        f" ({speed.samples} samples in {speed.duration_s:.2f} s{errors})"
    )
