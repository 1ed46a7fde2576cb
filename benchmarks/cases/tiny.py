"""Tiny items: Python ints in batches of 128, so that handing over a batch is the only cost."""

from __future__ import annotations

from benchmarks.adapters import TORCH, WORKERS
from benchmarks.benchmark_result import Result, Target
from benchmarks.interleaved import RunOptions, rates, time_loaders
from benchmarks.workloads import integers


def run(options: RunOptions) -> list[Result]:
    """Time ints with two workers, and inline for comparison."""
    workload = integers(1500 if options.quick else 4000)
    results: list[Result] = []
    for workers, targets in ((WORKERS, [Target(against=TORCH.name, at_least=5)]), (0, [])):
        ran = time_loaders(options, workload, workers=workers, peers=workers > 0)
        suffix = f"{workers} workers" if workers else "inline"
        results += rates(options, "tiny", f"integers, {suffix}", workload, ran, targets)
    return results
