"""A finding of the doctor: what costs time or memory, the evidence, and what to change."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.urls import redact
from penstock.observe.record.formatting import ratio_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One problem of a loop, or of the machine that it runs on."""

    name: str
    """A short fixed identifier, as in "decode-bound"."""

    cause: str
    """The problem, in one sentence."""

    evidence: str
    """The measurements that show it."""

    remedy: str
    """What to change, with the line to write if there is one; empty if there is nothing to do."""

    gain: float | None = None
    """Expected speed divided by the present speed (1.5 is 50 % more samples per second); None where unknown."""

    is_measured: bool = False
    """Whether a trial measured `gain`. Otherwise it is reported as an estimate."""

    is_uncertain: bool = False
    """Whether trials of the change disagree, or were made while other programs kept the machine busy."""

    is_for_accelerators: bool = False
    """Whether it costs something only on a machine with an accelerator, and the one that was measured has none."""

    loader: str = ""
    """The label of the loader that it is about; empty where it is about none, or not known. Only of finished runs."""

    def __post_init__(self) -> None:
        for name in ("cause", "evidence", "remedy", "loader"):
            object.__setattr__(self, name, redact(getattr(self, name)))

    @property
    def asks_for_change(self) -> bool:
        """Whether something is to be changed on the machine that was measured, as far as that is certain."""
        return not self.is_uncertain and not self.is_for_accelerators

    @property
    def gain_text(self) -> str:
        """Its gain, and whether it was measured; empty where unknown."""
        how = "measured" if self.is_measured else "an estimate"
        whose = " of that loop" if self.loader else ""
        return "" if self.gain is None else f"{ratio_text(self.gain)} the speed{whose} ({how})"
