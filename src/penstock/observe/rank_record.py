"""What is kept of one rank of a run that several processes make together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """One rank."""

    rank: int
    """Its number among all ranks, on all machines."""

    exit_code: int | None = None
    """As of a run; None where it is not known."""

    error: str | None = None
    """The exception that ended it, in one line."""

    wall_s: float = 0.0
    """How long it ran."""

    batches: int = 0
    """That its loaders handed out."""

    samples: int = 0
    """In those."""

    loop_s: float = 0.0
    """Seconds that it spent in loops over its loaders."""

    loading_s: float = 0.0
    """Of those, the seconds in which it waited for data."""

    missing: str = ""
    """Why something of it is missing, in words: it never began, it was killed, it still runs. Else empty."""
