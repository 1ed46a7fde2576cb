"""Seven loops to tune, each with another bottleneck, on this machine's cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.epoch_timing import Consumer
from benchmarks.jpegs import jpeg_workload
from benchmarks.workloads import Copied, Integers, Pool, Slow
from penstock.tune.tuned_loop import TunedLoop

LENGTH = 1 << 17
_CACHE_NBYTES = 48 << 20


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop to tune, and the memory that it may take."""

    name: str
    tuned_loop: TunedLoop
    ram_nbytes: int | None = None


class Hoarder(Dataset[Tensor]):
    """Each process that makes samples keeps a table of 48 MiB of its own, made with its first sample; 1 ms a sample."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.table: np.ndarray | None = None
        self.owner = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if self.table is None or self.owner != os.getpid():
            self.table, self.owner = np.ones(_CACHE_NBYTES, np.uint8), os.getpid()
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            pass
        return torch.full((3, 32, 32), float(index))

    def __getstate__(self) -> dict[str, object]:
        return {"length": self.length, "table": None, "owner": 0}


class Distant(Dataset[Tensor]):
    """Samples from a remote storage: 2 ms of sleep each. How busy the machine is hardly matters to them."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.002)
        return torch.full((3, 32, 32), float(index))


class Light(Dataset[Tensor]):
    """Samples of 0.1 ms."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        until = time.thread_time() + 0.0001
        while time.thread_time() < until:
            pass
        return torch.full((3, 32, 32), float(index))


def loops(stack: ExitStack) -> Iterator[Loop]:
    """Yield the loops; what they need is closed with `stack`."""
    jpegs = stack.enter_context(jpeg_workload(batches=4000, batch_size=32))
    images = Pool((3, 128, 128), np.float32, LENGTH)
    touch = Consumer("touch")
    yield _loop("decode-bound", jpegs.dataset, 32, step_s=0.02)
    yield _loop("transport-bound", images, 64, step=touch)
    yield _loop("tiny", Integers(LENGTH), 128, step=lambda batch: None)
    yield _loop("slow samples", Slow(Copied(images), ordinary_s=0.0001, burn=False), 32, step_s=0.005)
    yield _loop("storage-bound", Distant(), 16, step_s=0.014)
    yield _loop("compute-bound", Light(), 32, step=_Compute())
    yield _loop("memory-capped", Hoarder(LENGTH), 16, step_s=0.004, ram_nbytes=150 << 20)


class _Compute:
    """A step of about 50 ms on one core."""

    def __init__(self) -> None:
        self._weights = torch.randn(512, 512)

    def __call__(self, batch: Tensor) -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            self._weights @ self._weights


def _loop(
    name: str,
    dataset: Dataset[object],
    batch_size: int,
    *,
    step: Callable[[Tensor], object] | None = None,
    step_s: float = 0.0,
    ram_nbytes: int | None = None,
) -> Loop:
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
    return Loop(name=name, tuned_loop=TunedLoop(loader=loader, step=step, step_s=step_s), ram_nbytes=ram_nbytes)
