"""Main-process CPU time of a batch of 64 float images: user and system, all threads of the process that trains.

The consumer drops every batch without reading it. Peers are left out, because those that load in threads work in the
main process.
"""

from __future__ import annotations

from benchmarks.adapters import TORCH
from benchmarks.benchmark_result import Result, Target, compare
from benchmarks.interleaved import RunOptions, time_loaders
from benchmarks.workloads import images


def run(options: RunOptions) -> list[Result]:
    """Run float images, and report CPU time only."""
    workload = images(40 if options.quick else 100)
    ran = time_loaders(options, workload, consumer="drop", peers=False)
    figures = ran.figures(lambda epoch: epoch.cpu_s * 1e3 / epoch.batches)
    name = "main-process CPU per batch"
    return [compare("main-cpu", name, "ms", figures, [Target(against=TORCH.name, at_most=0.1)], ran.notes)]
