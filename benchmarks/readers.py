"""Readers beside short programs on their libraries: `python -m benchmarks.readers [--quick] [--rows ...] [--json F]`.

In one process, in samples per second of its CPU time (of the whole process: `time.process_time`), interleaved, on files
in the page cache. The programs are in `library_readers`: whole row groups, chunks and slices at once, a dict for each
sample. "in order" is one pass; "batches" asks for shuffled batches, as a DataLoader does, by `__getitems__` where a
source has it. Both sides' first samples are compared before anything is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks import library_readers
from benchmarks.benchmark_result import OURS, Result, Target, compare
from benchmarks.fresh_process import forked
from benchmarks.library_readers import Case, Pass
from benchmarks.machine_facts import facts
from benchmarks.table import terminal_table

AT_LEAST = 0.95
_LEAST_S = 0.1
"""CPU time of one figure: a pass that takes less is repeated."""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readers", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer samples and rounds")
    parser.add_argument("--rows", nargs="*", choices=sorted(library_readers.CASES), help="only these")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    started, results = time.perf_counter(), []
    for name in arguments.rows or library_readers.CASES:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            make = partial(library_readers.CASES[name], Path(folder), 1 if arguments.quick else 4)
            results.append(forked(partial(_measure, name, make, 3 if arguments.quick else 7)))
        Console(stderr=True).print(_summary(results[-1:]), style="dim")
        if arguments.json:
            arguments.json.write_text(json.dumps(_report(arguments.quick, results, started), indent=1) + "\n")
    Console(width=150).print(terminal_table(results))
    print(f"{_summary(results)}; {time.perf_counter() - started:.0f} s")


def _report(quick: bool, results: list[Result], started: float) -> dict[str, object]:
    return {
        "benchmark": "readers",
        "command": f"python -m benchmarks.readers{' --quick' if quick else ''}",
        "quick": quick,
        "machine": facts(),
        "load": os.getloadavg()[0],
        "results": [result.to_json() for result in results],
        "seconds": round(time.perf_counter() - started, 1),
    }


def _measure(name: str, make: Callable[[], Case], rounds: int) -> Result:
    case = make()
    for other in case.library.values():
        for mine, theirs in zip(case.ours(), other(), strict=False):
            _check_same(mine, theirs)
            if not case.compares_all:
                break
    runs = {OURS: case.ours, **case.library}
    figures: dict[str, list[float]] = {run: [] for run in runs}
    for number in range(-1, rounds):
        for run, one_pass in list(runs.items())[:: -1 if number % 2 else 1]:
            figure = _rate(one_pass, case.samples)
            if number >= 0:
                figures[run].append(figure)
    first = next(iter(case.library))
    return compare(name, name, case.unit, figures, [Target(against=first, at_least=AT_LEAST)], case.notes)


def _rate(one_pass: Pass, samples: int) -> float:
    passes, began = 0, time.process_time()
    while True:
        for _ in one_pass():
            pass
        passes += 1
        passed = time.process_time() - began
        if passed >= _LEAST_S:
            return passes * samples / passed


def _check_same(mine: object, theirs: object) -> None:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for name, value in theirs.items():
            _check_same(mine[name], value)
    elif isinstance(mine, list):
        for one, other in zip(mine, theirs, strict=True):  # type: ignore[call-overload]
            _check_same(one, other)
    elif not np.array_equal(mine, theirs):  # type: ignore[arg-type]
        raise RuntimeError(f"penstock read {mine!r}, and the library {theirs!r}")


def _summary(results: list[Result]) -> str:
    missed = [
        f"{result.name} {statistics.median(result.ratios[target.against]):.2f} of {target.against}"
        for result in results
        for target, is_reached in zip(result.targets, result.verdicts(), strict=True)
        if not is_reached
    ]
    return (
        f"readers: {AT_LEAST} of the library's calls in {len(results) - len(missed)} of {len(results)} rows, "
        f"missed: {', '.join(missed) or 'none'}"
    )


if __name__ == "__main__":
    main()
