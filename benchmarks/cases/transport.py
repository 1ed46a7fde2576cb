"""Transport: samples that are in memory already, so that moving them to the consumer is all the work.

A sample is a view of a row of a NumPy array (`torch.from_numpy(pool[i])`): no copy, no allocation, about 2 µs. In the
case "copies" every sample is a copy of that row, as a decoder would return it. That case has no target, because the
copying is the dataset's work and costs both sides the same.

The ceiling is what two processes reach that copy the same samples into batches of their own and hand out nothing: with
large samples it is the machine's memory.

Inline, torch's speed depends on the C heap: a batch below glibc's threshold (32 MiB at most) is placed into the block
of an earlier batch, already touched, or into fresh pages, depending on what the process freed before. The difference is
a factor of three from process to process, so every round has a new process for each loader alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial

from benchmarks.adapters import OURS, TORCH, WORKERS
from benchmarks.benchmark_result import Result, Target, compare, geometric_mean
from benchmarks.fresh_process import probe
from benchmarks.interleaved import RunOptions, interleave, time_loaders
from benchmarks.workloads import Workload, copied, in_memory

CEILING = "copying ceiling"
TIMES_TORCH = 6 if (os.cpu_count() or 1) < 4 else 10


def with_workers(options: RunOptions) -> list[Result]:
    """Time the three workloads with two workers."""
    return _case(
        options, "transport", in_memory(quick=options.quick), [Target(against=TORCH.name, at_least=TIMES_TORCH)]
    )


def inline(options: RunOptions) -> list[Result]:
    """Time the three workloads with no workers, each loader in its own processes."""
    results = []
    for workload in in_memory(quick=options.quick):
        words = ("inline", workload.name, str(workload.batches), options.consumer)
        ran = interleave({one.name: partial(probe, one.name, *words) for one in (OURS, TORCH)}, options.repeats)
        figures = ran.figures(lambda found: found["samples/s"])
        results.append(compare("inline", f"{workload.name}, inline", "samples/s", figures, [], ran.notes))
    targets = [Target(against=TORCH.name, at_least=1.5)]
    return [*results, geometric_mean("inline", "inline: geometric mean", results, targets)]


def copies(options: RunOptions) -> list[Result]:
    """Time samples that are each a copy, with two workers."""
    return _case(options, "copies", map(copied, in_memory(quick=options.quick)), [])


def _case(options: RunOptions, case: str, workloads: Iterable[Workload], targets: list[Target]) -> list[Result]:
    results = []
    for workload in workloads:
        ran = time_loaders(options, workload, bound=CEILING, copying=True)
        figures = ran.figures(lambda epoch, samples=workload.samples: samples / epoch.seconds)  # type: ignore[misc]
        results.append(compare(case, f"{workload.name}, {WORKERS} workers", "samples/s", figures, [], ran.notes))
    return [*results, geometric_mean(case, f"{case}: geometric mean", results, targets)]
