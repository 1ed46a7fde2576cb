"""The diagnosis: one verdict on where the time goes, and what causes it, the dearest and the most certain first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.observe.diagnose import loading, machine, memory, step
from penstock.observe.diagnose.bottleneck import HEALTHY, bottleneck, remedy_for
from penstock.observe.examination import Examination
from penstock.observe.finding import Finding

_CAUSES: tuple[Callable[[Examination], Finding | None], ...] = (
    loading.fails,
    loading.workers_hang,
    loading.stream_repeats_itself,
    loading.iterator_made_anew,
    machine.cpu_quota,
    machine.threads_in_workers,
    machine.too_many_workers,
    loading.short_epochs,
    loading.full_size_decode,
    loading.slow_samples,
    loading.cold_reads,
    loading.python_numbers,
    loading.double_precision,
    loading.workers_do_not_scale,
    loading.no_workers,
    loading.workers_cost_more,
    loading.best_change,
    machine.cpu_contention,
    memory.copy_on_write,
    memory.cache_in_each_worker,
    memory.pickled_for_each_worker,
    memory.shm_too_small,
    step.reads_back,
    step.non_blocking_from_pageable,
    step.pinned_for_nothing,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What an examination says."""

    verdict: Finding
    """The one bottleneck, or "healthy"."""

    findings: tuple[Finding, ...]
    """What to change, and why; the cause of the bottleneck first."""


def diagnose(found: Examination) -> Diagnosis:
    """Return what follows from an examination.

    >>> from penstock.observe.examination import Machine, Settings
    >>> diagnose(Examination(name="x", machine=Machine(), settings=Settings(dataset="D"), has_step=True)).verdict.name
    'unknown'
    """
    by_name: dict[str, Finding] = {}
    for cause in _CAUSES:
        finding = cause(found)
        if finding is not None:
            by_name.setdefault(finding.name, finding)
    findings = tuple(by_name.values())
    verdict = bottleneck(found, is_quiet=not findings)
    if verdict.name == HEALTHY and findings:
        verdict = replace(verdict, name="compute-bound")
    if not verdict.remedy:
        verdict = replace(verdict, remedy=findings[0].remedy if findings else remedy_for(verdict, found))
    return Diagnosis(verdict=verdict, findings=findings)
