"""Time to the first batch: from constructing the loader to a batch of 64 float images in hand, two workers.

Every repeat is a fresh interpreter that has imported what a script imports, and nothing else: a cold start. The second
epoch of the same loader, whose workers do not persist, is the warm one.
"""

from __future__ import annotations

from functools import partial

from benchmarks.contestants import OURS, TORCH
from benchmarks.figures import Result, Target, compare
from benchmarks.fresh import probe
from benchmarks.race import Plan, interleave
from benchmarks.workloads import images

METHODS = ("fork", "forkserver", "spawn")


def row(plan: Plan) -> list[Result]:
    """Time every way of starting processes; peers, who start in a way of their own, stand beside fork."""
    results = []
    peers = [peer for peer in plan.peers if peer.suits(images(1))]
    for method in METHODS:
        contestants = [OURS, TORCH, *(peers if method == "fork" else [])]
        runs = {one.name: partial(probe, one.name, "first-batch", method) for one in contestants}
        ran = interleave(runs, plan.repeats)
        for which in ("cold", "second"):
            figures = ran.figures(lambda found, which=which: found[which])  # type: ignore[misc]
            targets = [Target(against=TORCH.name, at_most=0.5)]
            name = f"first batch, {method}, {'cold' if which == 'cold' else 'second epoch'}"
            results.append(compare("first-batch", name, "ms", figures, targets, ran.notes))
    return results
