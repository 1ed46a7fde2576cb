"""The diagnosis: one verdict on where the time goes, and the findings that explain it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.observe.doctor import thresholds
from penstock.observe.doctor.causes.bottleneck import HEALTHY, MEANING, find_bottleneck, general_remedy
from penstock.observe.doctor.causes.cause import Cause, ask
from penstock.observe.doctor.causes.cause_registry import ABOUT_RESULTS, ABOUT_STEP, CAUSES, FAILURES, NOT_ABOUT_LOADING
from penstock.observe.doctor.causes.epochs import other_loader_restarted, short_epochs
from penstock.observe.doctor.causes.evidence import loading_matters
from penstock.observe.doctor.measurements import Measurements
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

    @property
    def is_healthy(self) -> bool:
        """Whether nothing certain is to be changed: that the time was too short, or the machine busy, is none."""
        is_open = self.verdict.name in (HEALTHY, "unknown")
        return is_open and not any(finding.asks_for_change for finding in self.findings)


def diagnose(measured: Measurements, causes: Sequence[Cause] = CAUSES) -> Diagnosis:
    """Return what follows from measurements.

    >>> from penstock.observe.doctor.measurements import Machine, Settings
    >>> diagnose(Measurements(name="x", machine=Machine(), settings=Settings(dataset="D"), has_step=True)).verdict.name
    'unknown'
    """
    findings = _find_all(measured, causes)
    verdict = find_bottleneck(measured, has_findings=not all(finding.is_for_accelerators for finding in findings))
    is_about_step = verdict.name in (HEALTHY, "unknown") and measured.as_is is not None
    if is_about_step and findings and findings[0].name == short_epochs.name and findings[0].asks_for_change:
        cause = f"Most of the loading time is spent {MEANING['start-up']}."
        verdict = replace(findings[0], name="start-up-bound", cause=cause, remedy="")
    if verdict.name == HEALTHY and any(finding.asks_for_change for finding in findings):
        verdict = replace(verdict, name="compute-bound")
    if not verdict.remedy:
        is_explained = bool(findings) and findings[0].asks_for_change and not _is_beside(findings[0], verdict)
        remedy = findings[0].remedy if is_explained else general_remedy(verdict, measured)
        verdict = replace(verdict, remedy=remedy)
    return Diagnosis(verdict=verdict, findings=findings)


def _is_beside(finding: Finding, verdict: Finding) -> bool:
    """Return whether a finding about the step, memory or results is right, but not why the loop waits."""
    is_loading = verdict.name.endswith("-bound") and verdict.name != "compute-bound"
    return is_loading and any(finding.name == cause.name for cause in (*ABOUT_RESULTS, *NOT_ABOUT_LOADING))


def _with_known_gain(finding: Finding, measured: Measurements, *, is_about_loading: bool) -> Finding:
    """Return a finding with the gain that is known: none while other programs decide how long each part takes.

    An estimate about loading is no more than what free loading gained, and none where its rounds disagree.
    """
    free = measured.gain_of(FREE)
    if measured.machine.is_busy:
        return replace(finding, gain=None, is_measured=False)
    if finding.gain is None or finding.is_measured or free is None or not is_about_loading:
        return finding
    return replace(finding, gain=min(finding.gain, max(1.0, free.median)) if free.is_clear else None)


def _in_order(causes: Sequence[Cause], measured: Measurements) -> Sequence[Cause]:
    """Return causes about the step before those about loading, where loading is hidden behind the step."""
    if not measured.has_step or loading_matters(measured):
        return causes
    first = (other_loader_restarted, *ABOUT_STEP)
    return sorted(causes, key=lambda one: (one not in (*FAILURES, *ABOUT_RESULTS), one not in first))


def _find_all(measured: Measurements, causes: Sequence[Cause]) -> tuple[Finding, ...]:
    by_name: dict[str, Finding] = {}
    for cause in _in_order(causes, measured):
        found = ask(cause, measured)
        if found is None:
            continue
        is_about_loading = cause not in NOT_ABOUT_LOADING
        finding = _with_known_gain(found, measured, is_about_loading=is_about_loading)
        is_little = finding.gain is not None and finding.gain < thresholds.WORTHWHILE_GAIN and not finding.is_measured
        if not (is_about_loading and is_little):
            by_name.setdefault(finding.name, finding)  # two causes may lead to the same change: the first explains it
    return tuple(sorted(by_name.values(), key=lambda finding: (finding.is_for_accelerators, finding.is_uncertain)))
