"""Transport: samples that lie in memory already, so that moving them into the consumer's hands is all the work.

A sample is a view on a row of a NumPy array (`torch.from_numpy(pool[i])`): no copy, no allocation, about 2 µs. In the
row "copies" every sample is a copy of that row in memory of its own, as a decoder would hand it out; there is no target
for it, for the copying is the dataset's work and costs both sides the same.

Inline, torch's speed depends on the C heap: a batch below glibc's threshold (32 MiB at most) may be laid into the block
of an earlier one, already touched, or into fresh pages, by what the process freed before. Hence a fresh process per
workload, which freed nothing large.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.contestants import TORCH, WORKERS
from benchmarks.figures import Result, Target, compare, geometric_mean
from benchmarks.race import Plan, race
from benchmarks.workloads import Workload, copied, in_memory


def with_workers(plan: Plan) -> list[Result]:
    """Race over the three workloads with two workers."""
    return _row(plan, "transport", in_memory(quick=plan.quick), WORKERS, [Target(against=TORCH.name, at_least=8)])


def inline(plan: Plan) -> list[Result]:
    """Race over the three workloads with no workers."""
    return _row(plan, "inline", in_memory(quick=plan.quick, longer=3), 0, [Target(against=TORCH.name, at_least=2)])


def copies(plan: Plan) -> list[Result]:
    """Race over samples that are each a copy, with two workers."""
    return _row(plan, "copies", map(copied, in_memory(quick=plan.quick)), WORKERS, [])


def _row(plan: Plan, row: str, workloads: Iterable[Workload], workers: int, targets: list[Target]) -> list[Result]:
    results = []
    suffix = f"{workers} workers" if workers else "inline"
    for workload in workloads:
        ran = race(plan, workload, workers=workers, peers=workers > 0)
        figures = ran.figures(lambda lap, samples=workload.samples: samples / lap.seconds)  # type: ignore[misc]
        results.append(compare(row, f"{workload.name}, {suffix}", "samples/s", figures, [], ran.notes))
    return [*results, geometric_mean(row, f"{row}: geometric mean", results, targets)]
