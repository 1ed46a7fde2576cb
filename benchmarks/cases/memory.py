"""Memory: the PSS of all processes at steady state, float images in batches of 128 (73.5 MiB), two workers.

The batch is large, so that the data dominates the 38 MiB of dataset and the memory of torch itself. Every repeat is a
fresh process per loader. "whole" is everything; "added" is that minus the same process just before it made its loader.
PSS counts mapped memory only, and no process maps a batch that waits in torch's queue, so "in all" adds the shared
memory that waits (`benchmarks.process_tree_memory`).
"""

from __future__ import annotations

from functools import partial

from benchmarks.adapters import OURS, TORCH
from benchmarks.benchmark_result import Result, Target, compare
from benchmarks.fresh_process import probe
from benchmarks.interleaved import RunOptions, interleave
from benchmarks.workloads import images

WHICH = (
    ("pss", "PSS, whole"),
    ("pss added", "PSS, added by the loader"),
    ("total", "in all, whole"),
    ("total added", "in all, added by the loader"),
)


def run(options: RunOptions) -> list[Result]:
    """Measure the memory of every loader."""
    peers = [peer for peer in options.peers if peer.supports(images(1))]
    ran = interleave({one.name: partial(probe, one.name, "memory") for one in (OURS, TORCH, *peers)}, options.repeats)
    results = []
    for which, what in WHICH:
        # PSS alone does not count the batches that wait in torch's queue.
        targets = [Target(against=TORCH.name, at_most=1)] if which.startswith("total") else []
        figures = ran.figures(lambda found, which=which: found[which])  # type: ignore[misc]
        results.append(compare("memory", what, "MiB", figures, targets, ran.notes))
    return results
