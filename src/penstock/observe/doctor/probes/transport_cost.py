"""The cost of transport: prebuilt samples, collated and sent by as many workers as the loader has.

Both sides of it need a processor for every batch, so where other programs take the processors it is measured in
processor time, and otherwise by the clock.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, default_collate

from penstock.core.host import usable_cores
from penstock.loader.dataloader import DataLoader as PenstockLoader
from penstock.observe.doctor import thresholds
from penstock.observe.doctor.probes import proc

_REPEATS = 3
"""Other work on the machine makes transport slower for a while, and never faster: the best of these counts."""


class PrebuiltSamples(Dataset[Any]):
    """A dataset of samples that exist already.

    Args:
        samples: one batch of them.
        repeats: how often each is returned.
    """

    def __init__(self, samples: list[Any], repeats: int) -> None:
        self._samples = samples
        self._repeats = repeats

    def __len__(self) -> int:
        return len(self._samples) * self._repeats

    def __getitem__(self, index: int) -> Any:
        return self._samples[index % len(self._samples)]


def measure_transport_s(loader: DataLoader[Any], samples: list[Any], seconds: float) -> float:
    """Return seconds per batch to collate `samples` and transport the batch to this process, as the loader does it.

    A collate function of the user's own is called once, before: its cost is measured for itself.

    Raises:
        Exception: from the collate function, or from a loader that cannot start its workers.
    """
    is_auto = loader.batch_sampler is not None
    collate = loader.collate_fn
    if is_auto and collate is not default_collate:
        samples, is_auto, collate = [collate(samples)], False, _as_it_is
    kind = PenstockLoader if isinstance(loader, PenstockLoader) else DataLoader
    prebuilt = kind(
        PrebuiltSamples(samples, 100_000),
        batch_size=len(samples) if is_auto else None,
        num_workers=loader.num_workers,
        collate_fn=collate,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
    )
    batches = iter(prebuilt)
    try:
        for _ in range(max(2, loader.num_workers)):
            next(batches)
        # Workers work in step, so batches arrive in bursts of one per worker: a burst is what is timed.
        burst = max(1, loader.num_workers)
        best_s, until, made = math.inf, time.perf_counter() + seconds, 0
        usage, here_s, own_s = proc.ProcessorUsage(), time.process_time(), proc.own_s()
        while best_s == math.inf or time.perf_counter() < until:
            taken_s = _batches_s(batches, burst, seconds / _REPEATS)
            made += burst * len(taken_s)
            best_s = min(best_s, statistics.median(taken_s))
        if (usage.others_cores() or 0.0) < thresholds.BUSY_FRACTION * usable_cores():
            return best_s
        here_s = time.process_time() - here_s
        workers_s = (proc.own_s() - own_s - here_s) / max(1, min(loader.num_workers, usable_cores()))
        return min(best_s, max(here_s, workers_s) / made)  # they work side by side
    finally:
        shut = getattr(batches, "_shutdown_workers", None)
        if shut is not None:
            shut()


def _as_it_is(batch: Any) -> Any:
    return batch


def _batches_s(batches: Iterator[Any], burst: int, seconds: float) -> list[float]:
    """Return the seconds per batch of each burst, measured for `seconds`."""
    taken_s: list[float] = []
    until = time.perf_counter() + seconds
    while not taken_s or time.perf_counter() < until:
        began = time.perf_counter()
        for _ in range(burst):
            next(batches)
        taken_s.append((time.perf_counter() - began) / burst)
    return taken_s
