"""Does an epoch survive a cluster that changes? `python -m benchmarks.cluster_faults`, with ray installed; a minute.

A Ray cluster of this machine alone, on 127.0.0.1: a head without cores, and nodes of one core, as Ray counts them. The
dataset has an array of 32 MiB that the workers of a node share, and one node is slow. While an epoch is loaded by
`num_workers=(1, 4)`, a node is added, another's daemon is killed, one more is added, and one is taken away as an
autoscaler does it. Every sample has to come once, in the order of an undisturbed epoch, with its own row of the array.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from penstock import DataLoader

COUNT, BATCH_SIZE, WIDTH = 600, 5, 1024
NODE = {"node_ip_address": "127.0.0.1", "include_dashboard": False, "object_store_memory": 160 << 20}
HEARTBEATS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 3,
}


class Rows(Dataset[tuple[int, torch.Tensor]]):
    """Sample i is i and row i of a large array; on one node it takes 0.2 s."""

    def __init__(self, slow_node: str) -> None:
        self.array = np.arange(8 << 20, dtype=np.float32).reshape(-1, WIDTH)
        self.slow_node = slow_node

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        import ray

        if ray.get_runtime_context().get_node_id() == self.slow_node:
            time.sleep(0.2)
        return index, torch.from_numpy(np.array(self.array[index]))


def main() -> None:
    """Load the epoch, and print what it took."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # what it says, on Linux: 127.0.0.1 stays 127.0.0.1
    # Ray runs workers at nice 15: on a machine that others keep busy, each would take minutes to import torch.
    os.environ.setdefault("RAY_worker_niceness", "0")
    with tempfile.TemporaryDirectory(prefix="ray-") as home:
        os.environ["RAY_TMPDIR"] = home
        import ray
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "_system_config": HEARTBEATS, **NODE}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            nodes = [cluster.add_node(num_cpus=1, **NODE) for _ in range(2)]
            ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
            _load(cluster, nodes)
        finally:
            ray.shutdown()
            cluster.shutdown()


def _load(cluster: Any, nodes: list[Any]) -> None:
    def kill() -> None:
        os.kill(nodes[1].all_processes["raylet"][0].process.pid, signal.SIGKILL)

    events = {
        10: ("a node is added", lambda: nodes.append(cluster.add_node(num_cpus=1, **NODE))),
        40: ("a node is killed", kill),
        70: ("a node is added", lambda: nodes.append(cluster.add_node(num_cpus=1, **NODE))),
        90: ("a node is taken away", lambda: cluster.remove_node(nodes[2], allow_graceful=True)),
    }
    loader = DataLoader(
        Rows(nodes[0].node_id),
        batch_size=BATCH_SIZE,
        shuffle=True,
        seed=0,
        num_workers=(1, 4),
        worker_type="ray",
        dispatch="demand",
    )
    seen: list[int] = []
    began = time.perf_counter()
    for number, (indices, rows) in enumerate(loader):
        assert torch.equal(rows[:, 0], indices.float() * WIDTH)
        seen += indices.tolist()
        if number in events:
            name, change = events[number]
            change()
            print(f"batch {number}: {name}", flush=True)
    undisturbed = DataLoader(range(COUNT), shuffle=True, seed=0)  # type: ignore[arg-type]
    assert seen == [int(index) for index in undisturbed], "samples were lost, or came twice, or in another order"
    counted = loader.statistics()
    assert not counted.quarantined, counted
    print(
        f"{len(seen)} samples in order, in {time.perf_counter() - began:.0f} s; "
        f"{counted.restarts} workers were replaced, {counted.retried} tasks repeated"
    )


if __name__ == "__main__":
    main()
