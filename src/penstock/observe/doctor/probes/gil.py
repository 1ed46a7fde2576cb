"""Whether the dataset releases Python's global lock (GIL), so that threads make samples in parallel."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from penstock.observe.doctor.probe_results import ThreadScaling
from penstock.observe.doctor.probes.sample_calls import iter_sample_calls

_ROUNDS = 3
_LEAST_S = 0.05
_SAMPLES = 256


def measure_thread_scaling(loader: DataLoader[Any], threads: int, seconds: float) -> ThreadScaling:
    """Make samples with one thread, with `threads`, and beside a thread that only counts; rounds are interleaved.

    All use the same samples, the first in the loader's order, so that caches are equally warm for all.
    """
    slice_s = max(_LEAST_S, seconds / (_ROUNDS * 4))
    sample_calls = [make for _, make in itertools.islice(iter_sample_calls(loader), _SAMPLES)]
    failures: list[str] = []
    alone, together, beside, idle = [], [], [], []
    for _ in range(_ROUNDS):
        alone.append(_rate(sample_calls, 1, slice_s, failures)[0])
        together.append(_rate(sample_calls, threads, slice_s, failures)[0])
        beside.append(_rate(sample_calls, 1, slice_s, failures, counting=True)[1])
        idle.append(_rate(sample_calls, 0, slice_s, failures, counting=True)[1])
        if failures:
            break
    best = max(alone)
    return ThreadScaling(
        threads=threads,
        speedup=max(together) / best if best else 0.0,
        other_thread_progress=min(1.0, max(beside) / max(1e-9, max(idle))),
        failure=failures[0] if failures else "",
    )


def _rate(
    sample_calls: list[Callable[[], Any]], threads: int, seconds: float, failures: list[str], *, counting: bool = False
) -> tuple[float, float]:
    """Return samples per second of all `threads` together, and counts per second of a thread that only counts."""
    numbers = itertools.count()
    until = time.perf_counter() + seconds
    finished, counted = [0] * threads, [0]

    def make(number: int) -> None:
        try:
            while time.perf_counter() < until:
                sample_calls[next(numbers) % len(sample_calls)]()
                finished[number] += 1
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")

    def count() -> None:
        while time.perf_counter() < until:
            counted[0] += 1

    running = [threading.Thread(target=make, args=(number,), daemon=True) for number in range(threads)]
    running += [threading.Thread(target=count, daemon=True)] if counting else []
    began = time.perf_counter()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return sum(finished) / (time.perf_counter() - began), counted[0] / seconds
