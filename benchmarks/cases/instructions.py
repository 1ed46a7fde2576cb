"""Instructions of Python's interpreter that the main thread executes for a batch, and for `iter()` of a later pass.

Two workers, in steady state: the next batch has come before it is asked for. Batches are clips, clips with labels, and
dicts of three. Where there is a GPU, torch's pinned loader and penstock's are compared too, with the copy to it, and
`device=` with torch's pinned loader. The figures are exact, and belong to one version of Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.adapters import OURS, TORCH
from benchmarks.benchmark_result import Result, compare
from benchmarks.fresh_process import forked
from benchmarks.interleaved import RunOptions
from benchmarks.workloads import Workload, clips, in_dicts, labelled_clips

_BATCHES = 24
_LOADS: dict[str, Callable[[int], Workload]] = {
    "clips": clips, "clips and labels": labelled_clips, "dicts of three": in_dicts
}  # fmt: skip


def run(options: RunOptions) -> list[Result]:
    """Count, for each kind of batch in a fresh process."""
    results = []
    for load, make in _LOADS.items():
        if options.only in load:
            for way, found in forked(partial(_counts, make, options.repeats)).items():
                for figure, what in (("batch", "a batch"), ("iter", "iter()")):
                    figures = {name: [one[figure] for one in counts] for name, counts in found.items()}
                    results.append(compare("instructions", f"{what}, {load}, {way}", "instructions", figures, [], []))
    return results


def _counts(make: Callable[[int], Workload], repeats: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the counts of penstock's and torch's passes, by the way."""
    from benchmarks import ways  # in the fork, because it asks whether there is a GPU
    from benchmarks.instructions import count_instructions

    workload = make(_BATCHES)
    pairs = {"without pinning": (ways.PLAIN, ways.TORCH_PLAIN)}
    if ways.CUDA:
        pairs |= {"pinned": (ways.PINNED, ways.TORCH), "device=": (ways.AHEAD, ways.TORCH)}
    options = {"batch_size": workload.batch_size, "num_workers": 2, "persistent_workers": True}

    def counted(way: ways.Way) -> list[dict[str, Any]]:
        loader = way.open(workload.dataset, **options)
        move = way.moved if way.pin_memory or way.ahead else lambda batch: batch
        return [count_instructions(loader, move, passes=0 if number else 2) for number in range(repeats)]

    return {
        name: {OURS.name: counted(ours), TORCH.name: counted(torchs)} for name, (ours, torchs) in pairs.items()
    }  # fmt: skip
