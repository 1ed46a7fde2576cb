"""The progress of a conversion, and the counter that reports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Stage = Literal["scanning", "writing", "joining", "comparing", "uploading"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a conversion is."""

    stage: Stage
    samples: int
    total: int | None
    """None until the number of samples is known."""
    nbytes: int
    """Of the samples that this stage has processed."""


class ProgressCounter:
    """Adds up what workers report."""

    def __init__(self, callback: Callable[[Progress], None] | None) -> None:
        self._callback = callback
        self._stage: Stage = "scanning"
        self._total: int | None = None
        self._samples = 0
        self._nbytes = 0
        self(0, 0)

    def begin_stage(self, stage: Stage, total: int | None) -> None:
        """Begin a stage, of `total` samples."""
        self._stage, self._total, self._samples, self._nbytes = stage, total, 0, 0
        self(0, 0)

    def __call__(self, samples: int, nbytes: int) -> None:
        """Count samples and bytes."""
        self._samples += samples
        self._nbytes += nbytes
        if self._callback is not None:
            self._callback(Progress(stage=self._stage, samples=self._samples, total=self._total, nbytes=self._nbytes))
