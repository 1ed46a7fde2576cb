"""Everyday loops beside torch's DataLoader: `python -m benchmarks.everyday [--quick] [--json FILE] [--cases ...]`.

Each loop of `benchmarks/everyday_loops.py` runs with the same dataset and arguments in both loaders, without workers
and with 1, 2 and 4 of them. One comparison has a fresh process, in which both loaders
are open at once. After a warm-up epoch of each, every round runs some epochs of each loader, in an order that is
reversed from round to round. The loop does nothing with a batch. Wall time and CPU time (of the process and of all its
workers) give samples per second and per CPU second. A ratio is penstock's figure divided by torch's of the same round:
above 1, penstock is faster.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import penstock
from benchmarks.adapters import OURS, TORCH
from benchmarks.benchmark_result import Result, Spread, Target, compare
from benchmarks.everyday_loops import LOOPS, Loop
from benchmarks.fresh_process import forked
from benchmarks.interleaved import interleave
from benchmarks.machine_facts import facts
from benchmarks.process_tree_cpu import cpu_s
from benchmarks.table import terminal_table

WORKERS = (0, 1, 2, 4)
AT_LEAST = 0.97
"""1, and what noise may take."""
LOADERS = {OURS.name: penstock.DataLoader, TORCH.name: torch.utils.data.DataLoader}
WIDTH = 150


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One loader's turn in one round."""

    samples: int
    seconds: float
    cpu_s: float


def main() -> None:
    """Run the selected loops, print the table and the least ratios, and write the JSON."""
    asked = _arguments()
    console, progress = Console(width=None if sys.stdout.isatty() else WIDTH), Console(stderr=True)
    start = time.perf_counter()
    results: list[Result] = []
    for loop in (loop for loop in LOOPS if _slug(loop.name) in asked.cases):
        for workers in asked.workers:
            results += measure(loop, workers, quick=asked.quick)
        progress.print(f"{loop.name}: {time.perf_counter() - start:.0f} s", style="dim")
        if asked.json:  # after every loop: a run that is stopped does not lose its figures
            asked.json.parent.mkdir(parents=True, exist_ok=True)
            report = _report(results, quick=asked.quick, seconds=time.perf_counter() - start)
            asked.json.write_text(json.dumps(report, indent=1) + "\n")
    console.print(terminal_table(results))
    console.print(summary(results), soft_wrap=True)


def measure(loop: Loop, workers: int, *, quick: bool) -> list[Result]:
    """Return the wall time and the CPU time of one loop with so many workers, both as samples per second."""
    rounds = forked(partial(_rounds, loop, workers, repeats=5 if quick else 9, least_s=0.1 if quick else 0.5))
    suffix = {0: "inline", 1: "1 worker"}.get(workers, f"{workers} workers")
    targets = [Target(against=TORCH.name, at_least=AT_LEAST)]

    def result(unit: str, figure: Callable[[Turn], float]) -> Result:
        figures = {name: [figure(turn) for turn in turns] for name, turns in rounds.items()}
        return compare(_slug(loop.name), f"{loop.name}, {suffix}", unit, figures, targets, [])

    return [
        result("samples/s", lambda turn: turn.samples / turn.seconds),
        result("samples/CPU s", lambda turn: turn.samples / turn.cpu_s),
    ]


def summary(results: list[Result]) -> str:
    """Return one line: how many ratios are at least 0.97, and the least of wall time and of CPU time."""
    medians = [(Spread.of(result.ratios[TORCH.name]).median, result) for result in results]
    reached = sum(ratio >= AT_LEAST for ratio, _ in medians)
    least = []
    for unit, what in (("samples/s", "wall time"), ("samples/CPU s", "CPU time")):
        ratio, result = min(((ratio, one) for ratio, one in medians if one.unit == unit), key=lambda pair: pair[0])
        least.append(f"least in {what} {ratio:.2f} ({result.name})")
    return f"everyday: {reached} of {len(medians)} ratios at least {AT_LEAST}; {'; '.join(least)}"


def _rounds(loop: Loop, workers: int, *, repeats: int, least_s: float) -> dict[str, list[Turn]]:
    torch.set_num_threads(1)
    arguments = {**loop.arguments, "num_workers": workers, "persistent_workers": workers > 0}
    dataset = loop.make()
    loaders = {name: kind(dataset, **arguments) for name, kind in LOADERS.items()}
    samples = len(dataset) if hasattr(dataset, "__len__") else dataset.length
    warm = {name: _turn(loader, 1, samples) for name, loader in loaders.items()}
    epochs = max(1, math.ceil(least_s / warm[TORCH.name].seconds))
    turns = {name: partial(_turn, loader, epochs, samples) for name, loader in loaders.items()}
    interleave(turns, 1)
    return interleave(turns, repeats).rounds


def _turn(loader: Iterable[Any], epochs: int, samples: int) -> Turn:
    gc.collect()
    cpu, start = cpu_s(), time.perf_counter()
    for _ in range(epochs):
        for _batch in loader:
            pass
    return Turn(samples=samples * epochs, seconds=time.perf_counter() - start, cpu_s=cpu_s() - cpu)


def _slug(name: str) -> str:
    return re.sub(r"\W+", "-", name.lower()).strip("-")


def _arguments() -> argparse.Namespace:
    names = [_slug(loop.name) for loop in LOOPS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.everyday", description=__doc__.partition(":")[0])
    parser.add_argument("--quick", action="store_true", help="five rounds of a tenth of a second, under six minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every repeat, ratio and machine fact")
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--workers", nargs="+", type=int, choices=WORKERS, default=WORKERS, help="numbers of workers (all of them)"
    )
    return parser.parse_args()


def _report(results: list[Result], *, quick: bool, seconds: float) -> dict[str, Any]:
    words = sys.argv[1:]
    if "--json" in words:  # where the file went is nobody's business
        at = words.index("--json")
        words = words[:at] + words[at + 2 :]
    return {
        "benchmark": "everyday",
        "command": shlex.join(["python", "-m", "benchmarks.everyday", *words]),
        "quick": quick,
        "machine": facts(),
        "seconds": round(seconds, 1),
        "results": [result.to_json() for result in results],
    }


if __name__ == "__main__":
    main()
