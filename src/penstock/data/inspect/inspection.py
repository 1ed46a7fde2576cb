"""The result of an inspection, as data and as JSON (`penstock.inspect/1`)."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from typing import Any

from penstock.data.inspect.field_summary import FieldSummary
from penstock.data.inspect.read_speed import ReadSpeed
from penstock.data.inspect.value_text import describe_value
from penstock.data.schema import Sample


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
    layout: dict[str, str]
    """Chunks and compression of each field, for formats that have them."""
    samples_read: int
    """Samples that `fields` describes."""
    fields: dict[str, FieldSummary]
    examples: list[Sample]
    """Some samples."""
    errors: list[str]
    """Errors of the first few records that could not be read."""
    speeds: list[ReadSpeed]

    def to_json(self) -> dict[str, Any]:
        """Return the inspection as JSON, with the examples' values as text."""
        return {
            "schema": "penstock.inspect/1",
            **{one.name: getattr(self, one.name) for one in dataclasses.fields(self)},
            "fields": {name: asdict(summary) for name, summary in self.fields.items()},
            "examples": [{name: describe_value(value) for name, value in sample.items()} for sample in self.examples],
            "speeds": [
                {**asdict(speed), "samples_per_s": speed.samples_per_s, "nbytes_per_s": speed.nbytes_per_s}
                for speed in self.speeds
            ],
        }
