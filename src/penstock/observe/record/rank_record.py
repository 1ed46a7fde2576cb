"""The record of one rank, in a run of several ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """The figures of one rank."""

    rank: int
    """Its number among all ranks, on all machines."""

    exit_code: int | None = None
    """As in RunRecord; None where unknown."""

    error: str | None = None
    """The exception that ended it, in one line."""

    wall_s: float = 0.0
    """Its running time."""

    batches: int = 0
    """Batches handed out by its loaders."""

    samples: int = 0
    """Samples in those batches."""

    loop_s: float = 0.0
    """Seconds that it spent in loops over its loaders."""

    loading_s: float = 0.0
    """Of those, the seconds in which it waited for data."""

    missing_reason: str = ""
    """Why the record is missing or incomplete (never started, killed, still running); empty if it is complete."""

    @property
    def samples_per_s(self) -> float:
        """Samples per second of loop."""
        return self.samples / self.loop_s if self.loop_s else 0.0

    @property
    def stall_fraction(self) -> float:
        """The share of its loops' time that the step waited for data, between 0 and 1."""
        return self.loading_s / self.loop_s if self.loop_s else 0.0
