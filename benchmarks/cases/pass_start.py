"""CPU time of a pass that has one batch of eight integers, without workers: little but its beginning and its end."""

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

_SAMPLES = 8
_PASSES = 1000


def run(options: RunOptions) -> list[Result]:
    """Time passes over the same loader, as a training has them."""
    ran = forked(partial(_time, 3 * options.repeats))
    return [compare("pass-start", "a pass of one batch, inline", "µs of CPU", ran.rounds, [], ran.notes)]


def _time(repeats: int) -> Timings[float]:
    kinds = {OURS.name: penstock.DataLoader, TORCH.name: TorchLoader}
    runs = {name: partial(_pass_us, kind(Integers(_SAMPLES), batch_size=_SAMPLES)) for name, kind in kinds.items()}
    interleave(runs, 1)
    return interleave(runs, repeats)


def _pass_us(loader: Iterable[Any]) -> float:
    began = time.process_time_ns()
    for _ in range(_PASSES):
        for _batch in loader:
            pass
    return (time.process_time_ns() - began) / 1e3 / _PASSES
