"""How long one of several workers of a stream takes for a sample, beside a worker that is the only one.

A worker that gets files or a range of its own takes as long for each sample, however many workers there are. One that
makes the whole stream, and returns every n-th sample of it, takes n times as long. Both are measured by forked children
that pose as the first worker of several, and of one; the loop itself does not show it, as its step and its workers
share the processors, and batches may have been made ahead.
"""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock.observe.doctor.probe_results import WorkerShare
from penstock.observe.doctor.probes import proc
from penstock.observe.doctor.probes.forked.forked_child import measure_in_child

_MOST_SAMPLES = 4000
_LEAST_SAMPLES = 4
"""After the first, for which files are opened, and buffers filled."""


def measure_worker_share(loader: DataLoader[Any], seconds: float) -> WorkerShare | None:
    """Return what a sample costs a worker of the loader's; None where too few were made in time, or they cannot be."""
    of_several = _measure_sample_s(loader, loader.num_workers, seconds / 2)
    alone = _measure_sample_s(loader, 1, seconds / 2) if of_several is not None else None
    if of_several is None or alone is None:
        return None
    return WorkerShare(sample_s=of_several, alone_s=alone)


def _measure_sample_s(loader: DataLoader[Any], workers: int, seconds: float) -> float | None:
    sample_s: float | None = measure_in_child(_run_child, loader, workers, seconds, seconds=seconds)
    return sample_s


def _run_child(loader: DataLoader[Any], workers: int, seconds: float, pipe: Connection) -> None:
    torch.set_num_threads(1)  # as in a worker; OpenMP's threads were not forked, and it would wait for them forever
    worker: Any = torch.utils.data._utils.worker
    own = {"id": 0, "num_workers": workers, "seed": torch.initial_seed(), "dataset": loader.dataset}
    worker._worker_info = worker.WorkerInfo(**own)
    until, made, took_s = time.perf_counter() + seconds, 0, 0.0
    with suppress(Exception):  # of the dataset, which the loop has shown by itself
        if loader.worker_init_fn is not None:
            loader.worker_init_fn(0)
        stream = iter(loader.dataset)
        next(stream)
        before = proc.thread_times()
        for _ in islice(stream, _MOST_SAMPLES):
            made += 1
            if time.perf_counter() > until:
                break
        took_s = proc.thread_times_since(before).busy_s
    pipe.send(took_s / made if took_s and made >= _LEAST_SAMPLES else None)
