"""Time to the first batch: from constructing the loader to receiving a batch of 64 float images, two workers.

Every repeat is a fresh interpreter that has imported only what a script imports: a cold start. The second epoch of the
same loader, whose workers do not persist, is the warm start. By forkserver, a cold start cannot take less than
an interpreter that imports torch and does nothing else, which is timed in the same rounds. Modules are compiled before,
as an installer compiles them.
"""

from __future__ import annotations

import compileall
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import penstock
from benchmarks.adapters import OURS, TORCH
from benchmarks.benchmark_result import Result, Target, compare
from benchmarks.fresh_process import probe
from benchmarks.interleaved import RunOptions, interleave
from benchmarks.workloads import images

METHODS = ("fork", "forkserver")
"""Not spawn, of which each worker imports torch, whatever the loader."""


def run(options: RunOptions) -> list[Result]:
    """Time every start method; peers, which have their own way to start, are listed with fork."""
    for package in (penstock.__file__, __file__):
        compileall.compile_dir(Path(package).parent, quiet=2)
    results = []
    peers = [peer for peer in options.peers if peer.supports(images(1))]
    for method in METHODS:
        adapters = [OURS, TORCH, *(peers if method == "fork" else [])]
        runs: dict[str, Callable[[], dict[str, float]]] = {
            one.name: partial(probe, one.name, "first-batch", method) for one in adapters
        }
        if method != "fork":
            runs["import torch"] = _import_torch
        ran = interleave(runs, options.repeats)
        for which in ("cold", "second"):
            rounds = {name: each for name, each in ran.rounds.items() if which in each[0]}
            figures = {name: [found[which] for found in each] for name, each in rounds.items()}
            targets = [Target(against=TORCH.name, at_most=0.5 if method == "fork" else 1 / 3)]
            name = f"first batch, {method}, {'cold' if which == 'cold' else 'second epoch'}"
            results.append(compare("first-batch", name, "ms", figures, targets, ran.notes))
    return results


def _import_torch() -> dict[str, float]:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return {"cold": (time.perf_counter() - began) * 1e3}
