"""Main-process CPU: what a batch of 64 float images costs the process that trains, user and system, all threads.

The consumer drops every batch unseen. Peers that load in threads are left out: their workers are the main process.
"""

from __future__ import annotations

from benchmarks.contestants import TORCH
from benchmarks.figures import Result, Target, compare
from benchmarks.race import Plan, race
from benchmarks.workloads import images


def row(plan: Plan) -> list[Result]:
    """Race over float images, and look at CPU time only."""
    workload = images(40 if plan.quick else 100)
    ran = race(plan, workload, way="drop", peers=False)
    figures = ran.figures(lambda lap: lap.cpu_s * 1e3 / lap.batches)
    name = "main-process CPU per batch"
    return [compare("main-cpu", name, "ms", figures, [Target(against=TORCH.name, at_most=0.1)], ran.notes)]
