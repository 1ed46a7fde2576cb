"""Transport: samples that lie in memory already, so that moving them into the consumer's hands is all the work.

A sample is a view on a row of a NumPy array (`torch.from_numpy(pool[i])`): no copy, no allocation, about 2 µs. In the
row "copies" every sample is a copy of that row in memory of its own, as a decoder would hand it out; there is no target
for it, for the copying is the dataset's work and costs both sides the same.

Inline, torch's speed depends on the C heap: a batch below glibc's threshold (32 MiB at most) may be laid into the block
of an earlier one, already touched, or into fresh pages, by what the process freed before, and which of the two varies
from process to process by a factor of three. Hence every round has a new process for each contestant alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from benchmarks.contestants import OURS, TORCH, WORKERS
from benchmarks.figures import Result, Target, compare, geometric_mean
from benchmarks.fresh import probe
from benchmarks.race import Plan, interleave, race
from benchmarks.workloads import Workload, copied, in_memory


def with_workers(plan: Plan) -> list[Result]:
    """Race over the three workloads with two workers."""
    return _row(plan, "transport", in_memory(quick=plan.quick), [Target(against=TORCH.name, at_least=8)])


def inline(plan: Plan) -> list[Result]:
    """Race over the three workloads with no workers, each contestant in processes of its own."""
    results = []
    for workload in in_memory(quick=plan.quick):
        words = ("inline", workload.name, str(workload.batches), plan.way)
        ran = interleave({one.name: partial(probe, one.name, *words) for one in (OURS, TORCH)}, plan.repeats)
        figures = ran.figures(lambda found: found["samples/s"])
        results.append(compare("inline", f"{workload.name}, inline", "samples/s", figures, [], ran.notes))
    targets = [Target(against=TORCH.name, at_least=2)]
    return [*results, geometric_mean("inline", "inline: geometric mean", results, targets)]


def copies(plan: Plan) -> list[Result]:
    """Race over samples that are each a copy, with two workers."""
    return _row(plan, "copies", map(copied, in_memory(quick=plan.quick)), [])


def _row(plan: Plan, row: str, workloads: Iterable[Workload], targets: list[Target]) -> list[Result]:
    results = []
    for workload in workloads:
        ran = race(plan, workload)
        figures = ran.figures(lambda lap, samples=workload.samples: samples / lap.seconds)  # type: ignore[misc]
        results.append(compare(row, f"{workload.name}, {WORKERS} workers", "samples/s", figures, [], ran.notes))
    return [*results, geometric_mean(row, f"{row}: geometric mean", results, targets)]
