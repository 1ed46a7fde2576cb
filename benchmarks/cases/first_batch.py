"""Time to the first batch: from constructing the loader to receiving a batch of 64 float images, two workers.

Every repeat is a fresh interpreter that has imported only what a script imports: a cold start. The second epoch of the
same loader, whose workers do not persist, is the warm start.
"""

from __future__ import annotations

from functools import partial

from benchmarks.adapters import OURS, TORCH
from benchmarks.benchmark_result import Result, Target, compare
from benchmarks.fresh_process import probe
from benchmarks.interleaved import RunOptions, interleave
from benchmarks.workloads import images

METHODS = ("fork", "forkserver", "spawn")


def run(options: RunOptions) -> list[Result]:
    """Time every start method; peers, which have their own way to start, are listed with fork."""
    results = []
    peers = [peer for peer in options.peers if peer.supports(images(1))]
    for method in METHODS:
        adapters = [OURS, TORCH, *(peers if method == "fork" else [])]
        runs = {one.name: partial(probe, one.name, "first-batch", method) for one in adapters}
        ran = interleave(runs, options.repeats)
        for which in ("cold", "second"):
            figures = ran.figures(lambda found, which=which: found[which])  # type: ignore[misc]
            targets = [Target(against=TORCH.name, at_most=0.5)]
            name = f"first batch, {method}, {'cold' if which == 'cold' else 'second epoch'}"
            results.append(compare("first-batch", name, "ms", figures, targets, ran.notes))
    return results
