"""The diagnosis: one verdict on where the time goes, and the findings that explain it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.observe.doctor.causes.bottleneck import (
    HEALTHY,
    bound_by_starts,
    find_bottleneck,
    general_remedy,
    seen_too_little,
)
from penstock.observe.doctor.causes.cause import Cause, ask
from penstock.observe.doctor.causes.cause_registry import ABOUT_RESULTS, ABOUT_STEP, CAUSES, FAILURES, NOT_ABOUT_LOADING
from penstock.observe.doctor.causes.epochs import other_loader_restarted
from penstock.observe.doctor.causes.evidence import is_unclear, outlasts_batches_ahead, step_is_most
from penstock.observe.doctor.causes.step import steps_grow
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.doctor.trial import FREE
from penstock.observe.record.finding import Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What follows from the measurements of one loop."""

    verdict: Finding
    """The one bottleneck, or "healthy"."""

    findings: tuple[Finding, ...]
    """What to change, and why: what explains the bottleneck comes first, then what could not be confirmed, and last
    what costs nothing on this machine."""


def diagnose(measured: Measurements, causes: Sequence[Cause] = CAUSES) -> Diagnosis:
    """Return what follows from measurements.

    >>> from penstock.observe.doctor.measurements import Machine, Settings
    >>> diagnose(Measurements(name="x", machine=Machine(), settings=Settings(dataset="D"), has_step=True)).verdict.name
    'unknown'
    """
    findings = _find_all(measured, causes)
    verdict = find_bottleneck(measured, has_findings=not all(finding.is_for_accelerators for finding in findings))
    verdict = bound_by_starts(verdict, findings[0]) if findings else verdict
    if verdict.name == HEALTHY and any(finding.asks_for_change for finding in findings):
        verdict = replace(verdict, name="compute-bound")
    elif verdict.name == HEALTHY:
        verdict = seen_too_little(measured) or verdict
    if not verdict.remedy:
        is_explained = bool(findings) and findings[0].asks_for_change and not _is_beside(findings[0], verdict)
        remedy = findings[0].remedy if is_explained else general_remedy(verdict, measured)
        verdict = replace(verdict, remedy=remedy)
    return Diagnosis(verdict=verdict, findings=findings)


def _is_beside(finding: Finding, verdict: Finding) -> bool:
    """Return whether a finding about the step, memory or results is right, but not why the loop waits."""
    is_loading = verdict.name.endswith("-bound") and verdict.name != "compute-bound"
    return is_loading and any(finding.name == cause.name for cause in (*ABOUT_RESULTS, *NOT_ABOUT_LOADING))


def _without_guess(finding: Finding, measured: Measurements) -> Finding:
    """Return a finding; an estimate is left out while other programs decide how long each part takes."""
    is_guess = measured.machine.is_busy and not finding.is_measured
    return replace(finding, gain=None) if is_guess else finding


def _at_most_free(finding: Finding, measured: Measurements) -> Finding:
    """Return a finding about loading; where its gain is an estimate, no more than what free loading gained."""
    free = measured.gain_of(FREE)
    if finding.gain is None or finding.is_measured or free is None:
        return finding
    if is_unclear(free) and outlasts_batches_ahead(measured):  # the loop as it was measured waits less than it will
        return replace(finding, gain=None)
    return replace(finding, gain=min(finding.gain, max(1.0, free.median)))


def _is_worthwhile(finding: Finding) -> bool:
    return finding.gain is None or finding.is_measured or finding.gain >= THRESHOLDS.worthwhile_gain


def _in_order(causes: Sequence[Cause], measured: Measurements) -> Sequence[Cause]:
    """Return causes about the step before those about loading, where the step is most of the time."""
    free = measured.gain_of(FREE)
    if free is None or not step_is_most(measured):
        return causes
    # Where free loading makes the step faster, too, a line of the step explains less than what loads beside it.
    first = (other_loader_restarted, *ABOUT_STEP) if free.median < THRESHOLDS.step_slowdown else (steps_grow,)
    return sorted(causes, key=lambda one: (one not in (*FAILURES, *ABOUT_RESULTS), one not in first))


def _find_all(measured: Measurements, causes: Sequence[Cause]) -> tuple[Finding, ...]:
    by_name: dict[str, Finding] = {}
    for cause in _in_order(causes, measured):
        finding = ask(cause, measured)
        if finding is not None:
            finding = _without_guess(finding, measured)
            if cause not in NOT_ABOUT_LOADING:
                finding = _at_most_free(finding, measured)
                if not _is_worthwhile(finding):
                    continue
            by_name.setdefault(finding.name, finding)  # two causes may lead to the same change: the first explains it
    return tuple(sorted(by_name.values(), key=lambda finding: (finding.is_for_accelerators, finding.is_uncertain)))
