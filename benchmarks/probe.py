"""Measure one loader in a fresh interpreter, as in a user's script.

`python -m benchmarks.probe ADAPTER` is followed by one of

    first-batch METHOD | memory | inline WORKLOAD BATCHES CONSUMER

Prints one line of JSON. Spawned processes import this file again, as they import a user's script, so its top has what a
user's script has there: torch and the loader's class.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

from benchmarks.epoch_timing import Consumer, time_epoch
from benchmarks.peers import adapter_named
from benchmarks.process_tree_memory import ProcessTreeMemory, process_tree_memory
from benchmarks.workloads import IN_MEMORY, images

ADAPTER = adapter_named(sys.argv[1])
if absent := ADAPTER.why_unavailable():  # imports it
    sys.exit(f"{ADAPTER.name}: {absent}")

QUEUE_FILL_S = 0.6
MEASUREMENTS = 3


def first_batch(method: str) -> dict[str, float]:
    """Time from constructing the loader to its first batch, touched; then the same for its second epoch."""
    workload = images(6)
    touch = Consumer("touch")
    start = time.perf_counter()
    with ADAPTER.open(workload, persistent=False, method=method) as epochs:
        iterator = iter(epochs)
        touch(next(iterator))
        cold_s = time.perf_counter() - start
        for batch in iterator:
            touch(batch)
        del iterator, batch
        start = time.perf_counter()
        iterator = iter(epochs)
        touch(next(iterator))
        second_s = time.perf_counter() - start
        for batch in iterator:
            touch(batch)
        del iterator, batch
    return {"cold": cold_s * 1e3, "second": second_s * 1e3}


def inline(name: str, batches: str, consumer: str) -> dict[str, float]:
    """Samples per second without workers, of the epoch after the first."""
    workload = IN_MEMORY[name](int(batches))
    consume = Consumer(consumer)
    with ADAPTER.open(workload, workers=0) as epochs:
        time_epoch(epochs, consume)
        return {"samples/s": workload.samples / time_epoch(epochs, consume).seconds}


def memory() -> dict[str, float]:
    """Memory of this process and its descendants: before there is a loader, and with one whose queues are full.

    The consumer holds one batch, and measures once the loader had time to fill its queues.
    """
    batches = 16
    workload = images(batches, batch_size=128)
    touch = Consumer("touch")
    before = process_tree_memory()
    taken: list[ProcessTreeMemory] = []
    with ADAPTER.open(workload) as epochs:
        for number, batch in enumerate(epochs):
            touch(batch)
            if number >= batches // 2 and len(taken) < MEASUREMENTS:  # by now every slot and every block was used once
                time.sleep(QUEUE_FILL_S)
                taken.append(process_tree_memory())
            del batch
    pss = statistics.median(one.pss_nbytes for one in taken)
    total = statistics.median(one.pss_nbytes + one.in_flight_nbytes for one in taken)
    found = {
        "pss": pss,
        "pss added": pss - before.pss_nbytes,
        "total": total,
        "total added": total - before.pss_nbytes - before.in_flight_nbytes,
    }
    return {name: nbytes / (1 << 20) for name, nbytes in found.items()}


if __name__ == "__main__":
    measure: dict[str, Callable[..., dict[str, float]]] = {
        "first-batch": first_batch,
        "inline": inline,
        "memory": memory,
    }
    print(json.dumps(measure[sys.argv[2]](*sys.argv[3:])), flush=True)
