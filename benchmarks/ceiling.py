"""The ceiling of a workload: plain processes that make the samples, or copy them into batches, and do nothing else."""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch

from benchmarks.adapters import WORKERS
from benchmarks.epoch_timing import EpochTiming
from benchmarks.workloads import Workload

_BATCHES = 2
"""As many as torch has under way for each worker."""


@contextmanager
def ceiling(
    workload: Workload, processes: int = WORKERS, *, copying: bool = False
) -> Iterator[Callable[[], EpochTiming]]:
    """Start `processes`, and yield a function that makes every sample of an epoch once, in all of them in parallel.

    If `copying`, they also copy their samples into batches, in `_BATCHES` that they reuse in turn: what remains of the
    work of a loader whose samples lie in memory.

    Its time is the sum of the processes' times divided by their number. No loader with as many workers can be faster:
    it would have to balance them perfectly and move the samples at no cost.
    """
    context = mp.get_context("fork")
    pipes, children = [], []
    for first in range(processes):
        ours, theirs = context.Pipe()
        child = context.Process(target=_make, args=(theirs, workload, first, processes, copying), daemon=True)
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)

    def run() -> EpochTiming:
        for pipe in pipes:
            pipe.send("epoch")
        seconds: list[float] = [pipe.recv() for pipe in pipes]
        return EpochTiming(seconds=sum(seconds) / len(seconds), cpu_s=0.0, batches=workload.batches)

    try:
        yield run
    finally:
        for pipe in pipes:
            pipe.send(None)
        for child in children:
            child.join()


def _make(asked: Connection, workload: Workload, first: int, step: int, copying: bool) -> None:
    torch.set_num_threads(1)  # as a loader's worker does
    epoch = _copy_batches if copying else _make_samples
    while asked.recv():
        start = time.perf_counter()
        epoch(workload, first, step)
        asked.send(time.perf_counter() - start)


def _make_samples(workload: Workload, first: int, step: int) -> None:
    for index in range(first, workload.samples, step):
        workload.dataset[index]


def _copy_batches(workload: Workload, first: int, step: int) -> None:
    dataset, size = workload.dataset, workload.batch_size
    batches = [torch.stack([dataset[0]] * size) for _ in range(_BATCHES)]
    for number in range(first, workload.batches, step):
        samples = [dataset[index] for index in range(number * size, (number + 1) * size)]
        torch.stack(samples, out=batches[number // step % _BATCHES])
