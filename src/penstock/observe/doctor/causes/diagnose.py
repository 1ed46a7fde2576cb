"""The diagnosis: one verdict on where the time goes, and the findings that explain it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.observe.doctor.causes.bottleneck import HEALTHY, find_bottleneck, general_remedy
from penstock.observe.doctor.causes.cause import Cause
from penstock.observe.doctor.causes.cause_registry import CAUSES
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.record.finding import Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What follows from the measurements of one loop."""

    verdict: Finding
    """The one bottleneck, or "healthy"."""

    findings: tuple[Finding, ...]
    """What to change, and why; what explains the bottleneck comes first."""


def diagnose(measured: Measurements, causes: Sequence[Cause] = CAUSES) -> Diagnosis:
    """Return what follows from measurements.

    >>> from penstock.observe.doctor.measurements import Machine, Settings
    >>> diagnose(Measurements(name="x", machine=Machine(), settings=Settings(dataset="D"), has_step=True)).verdict.name
    'unknown'
    """
    findings = _find_all(measured, causes)
    verdict = find_bottleneck(measured, has_findings=bool(findings))
    if verdict.name == HEALTHY and findings:
        verdict = replace(verdict, name="compute-bound")
    if not verdict.remedy:
        remedy = findings[0].remedy if findings else general_remedy(verdict, measured)
        verdict = replace(verdict, remedy=remedy)
    return Diagnosis(verdict=verdict, findings=findings)


def _find_all(measured: Measurements, causes: Sequence[Cause]) -> tuple[Finding, ...]:
    by_name: dict[str, Finding] = {}
    for cause in causes:
        if any(getattr(measured, need) is None for need in cause.needs):
            continue
        finding = cause.find(measured)
        if finding is not None:
            by_name.setdefault(finding.name, finding)  # two causes may lead to the same change: the first explains it
    return tuple(by_name.values())
