"""Tiny items: Python ints in batches of 128, so that the hand-over of a batch is all there is."""

from __future__ import annotations

from benchmarks.contestants import TORCH, WORKERS
from benchmarks.figures import Result, Target, compare
from benchmarks.race import Plan, race
from benchmarks.workloads import integers


def row(plan: Plan) -> list[Result]:
    """Race over ints with two workers, and inline for comparison."""
    workload = integers(1500 if plan.quick else 4000)
    results = []
    for workers, targets in ((WORKERS, [Target(against=TORCH.name, at_least=5)]), (0, [])):
        ran = race(plan, workload, workers=workers, peers=workers > 0)
        suffix = f"{workers} workers" if workers else "inline"
        figures = ran.figures(lambda lap: workload.samples / lap.seconds)
        results.append(compare("tiny", f"integers, {suffix}", "samples/s", figures, targets, ran.notes))
    return results
