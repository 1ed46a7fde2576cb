"""Types and statistics of one field, over the samples that were read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.schema import field_of, plain

_MAX_VALUES = 1 << 16
"""Values of one array that go into the statistics; of larger ones, every n-th."""


@dataclass(slots=True)
class FieldSummary:
    """What one field held in the samples that were read."""

    types: list[str] = field(default_factory=list)
    """As in "float32[3, 5..7]"; several where samples disagree."""
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    """Of finite numbers, as are `min` and `max`."""
    nonfinite: int = 0
    """NaNs and infinities."""
    lengths: tuple[int, int] | None = None
    """The shortest and the longest text in characters, or bytes value in bytes."""
    samples: int = 0
    """Samples that have the field."""

    def add(self, value: Any) -> None:
        """Add one sample's value."""
        self.samples += 1
        try:
            value = plain(value)
        except SourceError:  # a format may give lists, as of text
            self._add_type(type(value).__qualname__)
            return
        self._add_type(field_of(value).words())
        if isinstance(value, np.ndarray | np.generic):
            self._add_numbers(np.asarray(value).reshape(-1))
        else:
            low, high = self.lengths or (len(value), len(value))
            self.lengths = min(low, len(value)), max(high, len(value))

    def _add_numbers(self, numbers: np.ndarray) -> None:
        if numbers.dtype.kind == "c" or not numbers.size:
            return
        numbers = numbers[:: -(-numbers.size // _MAX_VALUES)].astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        self.nonfinite += numbers.size - finite.size
        if finite.size:
            low, high, mean = float(finite.min()), float(finite.max()), float(finite.mean())
            self.min = low if self.min is None else min(self.min, low)
            self.max = high if self.max is None else max(self.max, high)
            self.mean = mean if self.mean is None else self.mean + (mean - self.mean) / self.samples

    def _add_type(self, new: str) -> None:
        """Add a type. Types that differ only in sizes are merged to one with ranges of sizes."""
        head, _, sizes = new.partition("[")
        for number, known in enumerate(self.types):
            known_head, _, known_sizes = known.partition("[")
            if known_head == head and known_sizes.count(",") == sizes.count(",") and bool(known_sizes) == bool(sizes):
                self.types[number] = merge_sizes(head, known_sizes, sizes) if sizes.strip("]") else new
                return
        self.types.append(new)


def merge_sizes(head: str, known: str, new: str) -> str:
    """Return a type with ranges of sizes.

    >>> merge_sizes("uint8", "3, 4..5]", "3, 7]")
    'uint8[3, 4..7]'
    """
    ranges = []
    for old, size in zip(known.rstrip("]").split(", "), new.rstrip("]").split(", "), strict=True):
        first, _, last = old.partition("..")
        low, high = min(int(first), int(size)), max(int(last or first), int(size))
        ranges.append(str(low) if low == high else f"{low}..{high}")
    return f"{head}[{', '.join(ranges)}]"
