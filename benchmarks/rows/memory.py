"""Memory: the PSS of all processes at steady state, float images in batches of 128 (73.5 MiB), two workers.

So large a batch that the data dominates the 38 MiB of dataset and what an import of torch takes. Every repeat is a
fresh process per contestant; "whole" is everything, "added" is that minus the same process just before it made its
loader. PSS counts mapped memory only, and a batch that waits in torch's queue is mapped by nobody, so "in all" adds the
shared memory that waits (`benchmarks.family`).
"""

from __future__ import annotations

from functools import partial

from benchmarks.contestants import OURS, TORCH
from benchmarks.figures import Result, Target, compare
from benchmarks.fresh import probe
from benchmarks.race import Plan, interleave
from benchmarks.workloads import images

WHICH = (
    ("pss", "PSS, whole"),
    ("pss added", "PSS, added by the loader"),
    ("total", "in all, whole"),
    ("total added", "in all, added by the loader"),
)


def row(plan: Plan) -> list[Result]:
    """Look at the memory of every contestant."""
    peers = [peer for peer in plan.peers if peer.suits(images(1))]
    ran = interleave({one.name: partial(probe, one.name, "memory") for one in (OURS, TORCH, *peers)}, plan.repeats)
    results = []
    for which, what in WHICH:
        figures = ran.figures(lambda found, which=which: found[which])  # type: ignore[misc]
        results.append(compare("memory", what, "MiB", figures, [Target(against=TORCH.name, at_most=0.5)], ran.notes))
    return results
