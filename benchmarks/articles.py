"""What articles say about workers, measured: `python -m benchmarks.articles [--quick] [--json FILE]`.

torch's own DataLoader, without a GPU: "num_workers = number of cores", "more workers are always faster" and
"persistent_workers always helps". The settings of one loop are open at once, in a process of their own, and take turns
in rounds whose order is reversed from one to the next. Each turn is one epoch, after a warm-up epoch. A speed is the
samples per second divided by those of the loop's first setting in the same round. CPU time is that of the process and
of all its workers. `load` in the JSON is the machine's load average before and after: other programs ran.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.benchmark_result import Spread
from benchmarks.fresh_process import forked
from benchmarks.interleaved import interleave
from benchmarks.machine_facts import facts
from benchmarks.process_tree_cpu import cpu_s
from benchmarks.table import markdown_table

BATCH_SIZE = 8
CORES = len(os.sched_getaffinity(0))
AS_FAST = 0.95
"""A setting that reaches this share of the best one's speed is as fast, on a machine that others use too."""
ONCE, EACH_EPOCH = "persistent_workers=True", "workers started for each epoch"


class Samples(Dataset[Tensor]):
    """Samples that take some CPU time, or wait without taking any, or are rows of a tensor."""

    def __init__(self, length: int, *, compute_s: float = 0.0, wait_s: float = 0.0) -> None:
        self.rows = torch.zeros(length, 64)
        self.compute_s, self.wait_s = compute_s, wait_s

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        if self.compute_s:
            until = time.thread_time() + self.compute_s
            while time.thread_time() < until:
                pass
        if self.wait_s:
            time.sleep(self.wait_s)
        return self.rows[index]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop, and the settings of torch's DataLoader that are compared in it."""

    name: str
    dataset: Samples
    settings: Mapping[str, dict[str, Any]]
    step_s: float = 0.0
    """How long a step waits, as for a GPU."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One epoch."""

    seconds: float
    cpu_s: float


def loops() -> list[Loop]:
    """Return the loops that are measured."""
    numbers = sorted({0, 1, CORES, 2 * CORES, 4 * CORES})
    numbered = {f"num_workers={n}": {"num_workers": n, "persistent_workers": n > 0} for n in numbers}
    started: dict[str, dict[str, Any]] = {
        EACH_EPOCH: {"num_workers": 2},
        ONCE: {"num_workers": 2, "persistent_workers": True},
    }
    return [
        Loop(name="samples compute for 1 ms", dataset=Samples(512, compute_s=0.001), settings=numbered),
        Loop(name="samples wait for 4 ms", dataset=Samples(128, wait_s=0.004), settings=numbered),
        Loop(name="samples are rows of a tensor", dataset=Samples(16_384), settings=numbered),
        Loop(
            name="samples compute for 0.5 ms, a step of 10 ms",
            dataset=Samples(320, compute_s=0.0005),
            settings=numbered,
            step_s=0.01,
        ),
        Loop(name="an epoch of 8 batches", dataset=Samples(64, compute_s=0.0005), settings=started),
        Loop(name="an epoch of 500 batches", dataset=Samples(4_000, compute_s=0.0005), settings=started),
    ]


def measure(loop: Loop, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each setting of a loop, with a figure for each round."""
    turns: dict[str, list[Turn]] = forked(partial(_rounds, loop, rounds))
    first = next(iter(turns.values()))
    length = len(loop.dataset)
    return [
        {
            "loop": loop.name,
            "setting": setting,
            "samples_per_s": [length / turn.seconds for turn in found],
            "speed": [base.seconds / turn.seconds for base, turn in zip(first, found, strict=True)],
            "cpu_ms_per_sample": [turn.cpu_s / length * 1e3 for turn in found],
        }
        for setting, found in turns.items()
    ]


def _rounds(loop: Loop, rounds: int) -> dict[str, list[Turn]]:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    loaders = {
        name: DataLoader(loop.dataset, BATCH_SIZE, **arguments)  # type: ignore[misc]
        for name, arguments in loop.settings.items()
    }
    turns = {name: partial(_turn, loader, loop.step_s) for name, loader in loaders.items()}
    interleave(turns, 1)
    return interleave(turns, rounds).rounds


def _turn(loader: DataLoader[Tensor], step_s: float) -> Turn:
    cpu, start = cpu_s(), time.perf_counter()
    for _batch in loader:
        if step_s:
            time.sleep(step_s)
    return Turn(seconds=time.perf_counter() - start, cpu_s=cpu_s() - cpu)


def summary(rows: list[dict[str, Any]]) -> str:
    """Return one line: the fewest workers that were as fast as any in each loop, and what persistent workers gain."""
    by_loop: dict[str, dict[str, float]] = {}
    for row in rows:
        by_loop.setdefault(row["loop"], {})[row["setting"]] = Spread.of(row["speed"]).median
    fewest, gains = [], []
    for name, speeds in by_loop.items():
        if ONCE in speeds:
            gains.append(f"{speeds[ONCE]:.2f} ({name})")
        else:
            setting = next(one for one, speed in speeds.items() if speed >= AS_FAST * max(speeds.values()))
            fewest.append(f"{setting.partition('=')[2]} ({name})")
    return (
        f"articles: {CORES} cores; fewest workers within 5% of the fastest: {', '.join(fewest)}; "
        f"persistent_workers=True, times as fast: {', '.join(gains)}"
    )


def main() -> None:
    """Measure all loops, and print the table and a line that sums it up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 7")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    asked = parser.parse_args()
    before = os.getloadavg()
    rows = [row for loop in loops() for row in measure(loop, 3 if asked.quick else 7)]
    report = {
        "benchmark": "articles",
        "command": "python -m benchmarks.articles" + (" --quick" if asked.quick else ""),
        "machine": facts(),
        "load": {"before": before, "after": os.getloadavg()},
        "rows": rows,
    }
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1) + "\n")
    print(markdown_table(report))
    print(summary(rows))


if __name__ == "__main__":
    main()
