"""A finding: what costs time or memory, how that is known, and what to change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was found about a loop, or about the machine that it runs on."""

    name: str
    """Its kind, short and always the same, as in "decode-bound"."""

    cause: str
    """What is the matter, in one sentence."""

    evidence: str
    """The measurements that say so."""

    remedy: str
    """What to change, with the line to write where there is one; empty when nothing is to be done."""

    gain: float | None = None
    """How much faster the loop would be, as a factor (1.5: half as many samples more); None where nobody can tell."""

    is_measured: bool = False
    """Whether `gain` was measured by a trial. Otherwise it is an estimate, and is called one."""
