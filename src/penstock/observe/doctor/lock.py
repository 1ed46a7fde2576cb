"""Does the dataset let go of Python's global lock? Then threads can make samples side by side."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from penstock.observe.doctor.dataset import calls
from penstock.observe.examination import Threads

_ROUNDS = 3
_LEAST_S = 0.05


def threads_pay(loader: DataLoader[Any], threads: int, seconds: float) -> Threads:
    """Make samples with one thread and with `threads`, by turns, and beside a thread that only counts.

    The samples are those that come first in the loader's order, by turns, so that caches are as warm for all.
    """
    slice_s = max(_LEAST_S, seconds / (_ROUNDS * 4))
    makers = [make for _, make in itertools.islice(calls(loader), 256)]
    failures: list[str] = []
    alone, together, beside, idle = [], [], [], []
    for _ in range(_ROUNDS):
        alone.append(_rate(makers, 1, slice_s, failures)[0])
        together.append(_rate(makers, threads, slice_s, failures)[0])
        beside.append(_rate(makers, 1, slice_s, failures, counting=True)[1])
        idle.append(_rate(makers, 0, slice_s, failures, counting=True)[1])
        if failures:
            break
    best = max(alone)
    return Threads(
        threads=threads,
        speedup=max(together) / best if best else 0.0,
        others_progress=min(1.0, max(beside) / max(1e-9, max(idle))),
        failure=failures[0] if failures else "",
    )


def _rate(
    makers: list[Callable[[], Any]], threads: int, seconds: float, failures: list[str], *, counting: bool = False
) -> tuple[float, float]:
    """Return samples per second of `threads` together, and what a counting thread counted per second."""
    turns = itertools.count()
    until = time.perf_counter() + seconds
    made, counted = [0] * threads, [0]

    def make(number: int) -> None:
        try:
            while time.perf_counter() < until:
                makers[next(turns) % len(makers)]()
                made[number] += 1
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
    return sum(made) / (time.perf_counter() - began), counted[0] / seconds
