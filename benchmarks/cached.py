"""`penstock.cached` on a loop that is bound by decoding: `python -m benchmarks.cached [--quick] [--json FILE]`.

JPEGs are decoded with Pillow, in torch's DataLoader and in penstock's, inline and with 2 workers that persist: two
epochs without a cache, and with a new one in memory or in a file (in a temporary folder, so from the page cache).
Ratios are taken within a round: what the first epoch costs more, and how many times as fast the second is.
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
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from benchmarks.interleaved import interleave
from benchmarks.jpegs import jpeg_workload
from benchmarks.machine_facts import facts
from benchmarks.process_tree_cpu import cpu_s
from benchmarks.workloads import Workload

LOADERS: dict[str, Callable[..., Any]] = {"torch": TorchDataLoader, "penstock": penstock.DataLoader}
KINDS = ("uncached", "ram", "disk")
WORKERS = (0, 2)

Epochs = list[tuple[float, float]]
"""Of each epoch: seconds, and CPU seconds of all processes."""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cached", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer samples, 3 rounds instead of 5")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with jpeg_workload(4 if asked.quick else 12) as workload:
        runs = {
            f"{name}, {workers} workers, {kind}": partial(_two_epochs, workload, loader, workers, kind)
            for name, loader in LOADERS.items()
            for workers in WORKERS
            for kind in KINDS
        }
        rounds = interleave(runs, 3 if asked.quick else 5).rounds
        samples = len(workload.dataset)
    ratios = {name: _ratios(rounds, name) for name in rounds if not name.endswith("uncached")}
    found = {
        "benchmark": "cached", "machine": facts(), "load": os.getloadavg()[0], "samples": samples,
        "rounds": rounds, "ratios": ratios,
    }  # fmt: skip
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{'':<28}{'first epoch':>24}{'second epoch':>28}")
    print(f"{'':<28}{'time':>12}{'CPU time':>12}{'times as fast':>16}{'in CPU time':>12}")
    for name, ratio in ratios.items():
        print(f"{name:<28}" + "".join(f"{ratio[one]:>{width}.2f}" for one, width in _COLUMNS.items()))


_COLUMNS = {"first": 12, "first_cpu": 12, "second_gain": 16, "second_cpu_gain": 12}


def _two_epochs(workload: Workload, loader: Callable[..., Any], workers: int, kind: str) -> Epochs:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        dataset: Any = workload.dataset
        if kind != "uncached":
            path = os.path.join(folder, "samples") if kind == "disk" else None
            dataset = penstock.cached(dataset, kind, limit="4GiB", path=path)
        batches = loader(
            dataset, batch_size=workload.batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        )
        epochs = [_epoch(batches) for _ in range(2)]
        del batches
    return epochs


def _epoch(batches: Any) -> tuple[float, float]:
    began, began_cpu = time.perf_counter(), cpu_s()
    for batch in batches:
        int(batch[0, 0, 0, 0])
    return time.perf_counter() - began, cpu_s() - began_cpu


def _ratios(rounds: dict[str, list[Epochs]], name: str) -> dict[str, float]:
    plain = rounds[f"{name.rpartition(', ')[0]}, uncached"]
    pairs = [*zip(rounds[name], plain, strict=True)]

    def ratio(epoch: int, what: int) -> float:
        return statistics.median(one[epoch][what] / other[epoch][what] for one, other in pairs)

    gains = {"second_gain": 1 / ratio(1, 0), "second_cpu_gain": 1 / ratio(1, 1)}
    return {"first": ratio(0, 0), "first_cpu": ratio(0, 1), **gains}


if __name__ == "__main__":
    main()
