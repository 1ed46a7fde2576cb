"""Does throughput grow with machines? `python -m benchmarks.cluster [--quick] [--json FILE]`, with ray installed.

A Ray cluster of this machine alone, on 127.0.0.1: a head without cores, and four nodes of one core each, as Ray counts
them. A sample is a uint8 image of 3x224x224 and a sleep of 20 ms: **the sleep stands for the core of another machine**,
since four real ones, the trainer's and Ray's own processes do not fit into this one. What is measured is whether
handing out pieces, bringing batches over and putting them into slots keep up, in this process, with 1, 2 and 4 such
nodes. All batches go through Ray's object stores and one copy into a slot.

Every round runs each number of nodes once, in a shuffled order; a figure is samples per second of an epoch from its
first batches on, when every worker is at work. `of linear` is a round's rate over that of one node times the nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.benchmark_result import Spread
from benchmarks.machine_facts import facts
from penstock import DataLoader

NODES = (1, 2, 4)
TARGET = 0.85
SLEEP_S = 0.02
BATCH_SIZE = 16
LOOPBACK = {"node_ip_address": "127.0.0.1", "include_dashboard": False, "object_store_memory": 256 << 20}


class Slow(Dataset[tuple[torch.Tensor, int]]):
    """Images that each take a core of another machine for 20 ms."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.image = torch.zeros(3, 224, 224, dtype=torch.uint8)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(SLEEP_S)
        return self.image, index


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # what it says, on Linux: 127.0.0.1 stays 127.0.0.1
    with tempfile.TemporaryDirectory(prefix="ray-") as home:
        os.environ["RAY_TMPDIR"] = home  # not where Ray would tell other programs of this cluster
        found = _measure(quick=asked.quick)
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    _print(found)


def _measure(*, quick: bool) -> dict[str, Any]:
    import ray
    from ray.cluster_utils import Cluster

    began = time.perf_counter()
    rounds, batches = (3, 24) if quick else (7, 48)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **LOOPBACK})
    try:
        for _ in range(max(NODES)):
            cluster.add_node(num_cpus=1, **LOOPBACK)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        rates = _rates(rounds, batches)
    finally:
        ray.shutdown()
        cluster.shutdown()
    return {
        "benchmark": "cluster",
        "quick": quick,
        "machine": {**facts(), "ray": ray.__version__},
        "sleep_s": SLEEP_S,
        "batch_size": BATCH_SIZE,
        "batches_per_node": batches,
        "samples_per_s": {str(nodes): rates[nodes] for nodes in NODES},
        "of_linear": {
            str(nodes): [many / (nodes * one) for many, one in zip(rates[nodes], rates[1], strict=True)]
            for nodes in NODES[1:]
        },
        "target": TARGET,
        "seconds": round(time.perf_counter() - began, 1),
    }


def _rates(rounds: int, batches: int) -> dict[int, list[float]]:
    """Return the samples per second of each round, by the number of nodes."""
    rates: dict[int, list[float]] = {nodes: [] for nodes in NODES}
    order = random.Random(0)
    for _ in range(rounds):
        for nodes in order.sample(NODES, len(NODES)):
            rates[nodes].append(_rate(nodes, batches * nodes))
    return rates


def _rate(nodes: int, batches: int) -> float:
    """Return the samples per second of an epoch on so many nodes, one worker on each."""
    loader = DataLoader(
        Slow(batches * BATCH_SIZE),
        batch_size=BATCH_SIZE,
        num_workers=nodes,
        worker_type="ray",
        persistent_workers=True,
        dispatch="demand",
    )
    for _ in loader:  # an epoch to get everybody to work
        break
    wanted, counted, since = 2 * nodes, 0, 0.0
    for number, (_, labels) in enumerate(loader):
        if number == wanted:
            since = time.perf_counter()
        elif number > wanted:
            counted += len(labels)
    rate = counted / (time.perf_counter() - since)
    assert loader.statistics().restarts == 0
    return rate


def _print(found: dict[str, Any]) -> None:
    for nodes, rates in found["samples_per_s"].items():
        spread = Spread.of(rates)
        print(f"{nodes} nodes: {spread.median:7.1f} samples/s ({spread.lowest:.1f} … {spread.highest:.1f})")
    words = []
    for nodes, shares in found["of_linear"].items():
        spread = Spread.of(shares)
        words.append(f"{nodes} nodes {spread.median:.3f} ({spread.lowest:.3f} … {spread.highest:.3f})")
    reached = all(statistics.median(shares) >= TARGET for shares in found["of_linear"].values())
    print(f"cluster: of linear: {', '.join(words)}; target {TARGET}: {'reached' if reached else 'not reached'}")


if __name__ == "__main__":
    main()
