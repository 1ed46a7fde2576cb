"""The ceiling of a workload: plain processes that make the samples, and do nothing else with them."""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch

from benchmarks.contestants import WORKERS
from benchmarks.laps import Lap
from benchmarks.workloads import Workload


@contextmanager
def ceiling(workload: Workload, processes: int = WORKERS) -> Iterator[Callable[[], Lap]]:
    """Start `processes`, and yield a function that has them make every sample of an epoch once, all at the same time.

    Its time is the sum of what the processes needed, divided by their number: no loader with as many workers can be
    faster, for it would have to balance them perfectly and move the samples for nothing.
    """
    context = mp.get_context("fork")
    pipes, children = [], []
    for first in range(processes):
        ours, theirs = context.Pipe()
        child = context.Process(target=_make, args=(theirs, workload, first, processes), daemon=True)
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)

    def run() -> Lap:
        for pipe in pipes:
            pipe.send("epoch")
        seconds: list[float] = [pipe.recv() for pipe in pipes]
        return Lap(seconds=sum(seconds) / len(seconds), cpu_s=0.0, batches=workload.batches)

    try:
        yield run
    finally:
        for pipe in pipes:
            pipe.send(None)
        for child in children:
            child.join()


def _make(asked: Connection, workload: Workload, first: int, step: int) -> None:
    torch.set_num_threads(1)  # as a loader's worker does
    while asked.recv():
        start = time.perf_counter()
        for index in range(first, workload.samples, step):
            workload.dataset[index]
        asked.send(time.perf_counter() - start)
