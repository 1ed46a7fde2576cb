"""How far a conversion is, and what tells of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a conversion is."""

    stage: str
    """looking, writing, joining or comparing."""
    samples: int
    total: int | None
    """None where nobody knows yet."""
    nbytes: int
    """Of the samples that were dealt with in this stage."""


class Meter:
    """Adds up what workers report, and tells of it."""

    def __init__(self, tell: Callable[[Progress], None] | None) -> None:
        self._tell = tell
        self.begin("looking", None)

    def begin(self, stage: str, total: int | None, samples: int = 0) -> None:
        """Begin a stage, in which `samples` are dealt with already."""
        self._stage, self._total, self._samples, self._nbytes = stage, total, samples, 0
        self(0, 0)

    def __call__(self, samples: int, nbytes: int) -> None:
        """Count samples and bytes."""
        self._samples += samples
        self._nbytes += nbytes
        if self._tell is not None:
            self._tell(Progress(stage=self._stage, samples=self._samples, total=self._total, nbytes=self._nbytes))
