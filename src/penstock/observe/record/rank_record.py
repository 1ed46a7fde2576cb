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
