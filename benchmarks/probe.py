"""A user's script, in a fresh interpreter: `python -m benchmarks.probe CONTESTANT WHAT ...`, where WHAT ... is

    first-batch METHOD | memory | inline WORKLOAD BATCHES CONSUMER

Prints one line of JSON. Processes that are spawned import this file again, as they import a user's script, and find at
its top what a user's script has there: torch, and the loader's class.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

from benchmarks.family import FamilyMemory, family_memory
from benchmarks.laps import Consumer, lap
from benchmarks.peers import contestant_named
from benchmarks.workloads import IN_MEMORY, images

CONTESTANT = contestant_named(sys.argv[1])
if absent := CONTESTANT.missing():  # imports it
    sys.exit(f"{CONTESTANT.name}: {absent}")

FILLING_S = 0.6
LOOKS = 3


def first_batch(method: str) -> dict[str, float]:
    """Time from constructing the loader to its first batch, touched; then the same for its second epoch."""
    workload = images(6)
    touch = Consumer("touch")
    start = time.perf_counter()
    with CONTESTANT.open(workload, persistent=False, method=method) as epochs:
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


def inline(name: str, batches: str, way: str) -> dict[str, float]:
    """Samples per second without workers, of the epoch after the first."""
    workload = IN_MEMORY[name](int(batches))
    consume = Consumer(way)
    with CONTESTANT.open(workload, workers=0) as epochs:
        lap(epochs, consume)
        return {"samples/s": workload.samples / lap(epochs, consume).seconds}


def memory() -> dict[str, float]:
    """Memory of this process and its descendants: before there is a loader, and with one whose queues are full.

    The consumer holds one batch, and looks when the loader had time to run as far ahead as it goes.
    """
    batches = 16
    workload = images(batches, batch_size=128)
    touch = Consumer("touch")
    before = family_memory()
    looks: list[FamilyMemory] = []
    with CONTESTANT.open(workload) as epochs:
        for number, batch in enumerate(epochs):
            touch(batch)
            if number >= batches // 2 and len(looks) < LOOKS:  # by now every slot and every block was used once
                time.sleep(FILLING_S)
                looks.append(family_memory())
            del batch
    pss = statistics.median(look.pss_nbytes for look in looks)
    total = statistics.median(look.pss_nbytes + look.in_flight_nbytes for look in looks)
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
