"""Time one epoch of a loader, with a consumer that reads the data."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from benchmarks import process_tree_cpu
from benchmarks.adapters import Epochs

CACHE_LINE_NBYTES = 64


@dataclass(frozen=True, kw_only=True)
class EpochTiming:
    """One epoch: its wall time, and the CPU time (user and system) of the consuming process."""

    seconds: float
    cpu_s: float
    batches: int
    tree_cpu_s: float = 0.0
    """The CPU time of the process and of its workers."""


class Consumer:
    """What the loop does with a batch.

    `touch` reads one byte of every cache line, the least that a step can do. `copy` copies the batch once into a buffer
    that is reused, as pinning it would. `drop` ignores it.
    """

    MODES = ("touch", "copy", "drop")

    def __init__(self, mode: str) -> None:
        if mode not in self.MODES:
            raise ValueError(f"the consumer is one of {', '.join(self.MODES)}, it is {mode!r}")
        self._mode = mode
        self._buffer = np.empty(0, np.uint8)
        self.seen = 0

    def __call__(self, batch: Any) -> None:
        """Consume one batch: a tensor, an array, or a list, tuple or dict of them."""
        if self._mode == "drop":
            return
        for array in arrays(batch):
            flat = array.reshape(-1).view(np.uint8)
            if self._mode == "touch":
                self.seen ^= int(np.bitwise_xor.reduce(flat[::CACHE_LINE_NBYTES]))
                continue
            if len(self._buffer) < len(flat):
                self._buffer = np.zeros(len(flat), np.uint8)
            self._buffer[: len(flat)] = flat


def time_epoch(epochs: Epochs, consume: Callable[[Any], None]) -> EpochTiming:
    """Run one epoch and return its timing."""
    gc.collect()
    batches, before = 0, process_tree_cpu.cpu_s()
    cpu, start = time.process_time(), time.perf_counter()
    for batch in epochs:
        consume(batch)
        batches += 1
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return EpochTiming(seconds=seconds, cpu_s=cpu, batches=batches, tree_cpu_s=process_tree_cpu.cpu_s() - before)


def arrays(batch: Any) -> Iterator[np.ndarray]:
    """Yield the arrays of a batch: a tensor, an array, or a list, tuple or dict of them."""
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, list | tuple):
        yield from chain.from_iterable(map(arrays, batch))
    else:
        yield batch if isinstance(batch, np.ndarray) else batch.numpy()
