"""CPU time of passes that have few batches of eight integers, without workers: little but their beginning and end."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch.utils.data import DataLoader as TorchLoader

import penstock
from benchmarks.adapters import OURS, TORCH
from benchmarks.benchmark_result import Result, compare
from benchmarks.fresh_process import forked
from benchmarks.interleaved import RunOptions, Timings, interleave
from benchmarks.workloads import Integers

_BATCH_SIZE = 8
_PASSES = 1000
_KINDS = {
    "a pass of one batch, inline": (1, {}),
    "a shuffled pass of four batches, inline": (4, {"shuffle": True}),
}
"""How many batches, and what else the loaders are given."""


def run(options: RunOptions) -> list[Result]:
    """Time passes over the same loader, as a training has them."""
    results = []
    for name, (batches, arguments) in _KINDS.items():
        ran = forked(partial(_time, 3 * options.repeats, batches, arguments))
        results.append(compare("pass-start", name, "µs of CPU", ran.rounds, [], ran.notes))
    return results


def _time(repeats: int, batches: int, arguments: dict[str, Any]) -> Timings[float]:
    data = Integers(batches * _BATCH_SIZE)
    kinds = {OURS.name: penstock.DataLoader, TORCH.name: TorchLoader}
    loaders = {name: kind(data, batch_size=_BATCH_SIZE, **arguments) for name, kind in kinds.items()}
    runs = {name: partial(_pass_us, loader) for name, loader in loaders.items()}
    interleave(runs, 1)
    return interleave(runs, repeats)


def _pass_us(loader: Iterable[Any]) -> float:
    began = time.process_time_ns()
    for _ in range(_PASSES):
        for _batch in loader:
            pass
    return (time.process_time_ns() - began) / 1e3 / _PASSES
