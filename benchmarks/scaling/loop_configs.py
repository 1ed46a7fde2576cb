"""The configurations that are predicted and then measured: samples of a known cost, and what they represent.

A sample that sleeps represents one that a core of another machine makes: it takes time and no core of this machine, so
there may be many more workers than cores. A lock that is held for the time a sample takes on a link represents a link
that all workers share.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.scaling.costs import Costs
from benchmarks.scaling.trainer import Trainer
from benchmarks.workloads import SEED, Pool

DATASET_LENGTH = 1 << 17
SHAPES = {"small": (3, 32, 32), "image": (3, 224, 224)}
"""Of float32 samples: 12 KiB and 588 KiB."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """One configuration of a loop on this machine; times in seconds, as requested."""

    group: str
    """The group of configurations that it belongs to: what it shows."""

    workers: int
    batch_size: int
    sample_s: float = 0.0
    on_core: bool = False
    """Whether a sample burns CPU for its time; otherwise it sleeps."""
    slow_share: float = 0.0
    """The share of samples that take `slow_times` as long."""
    slow_times: float = 1.0
    step_s: float = 0.0
    round_trip_s: float = 0.0
    """Per batch, asleep: a round trip."""
    link_s: float = 0.0
    """Per sample, exclusively: a link that all workers share."""
    shape: str = "small"

    @property
    def in_bulk(self) -> bool:
        """Whether the dataset makes a whole batch at once, which the loader then never splits."""
        return self.round_trip_s > 0 or self.link_s > 0

    def samples_s(self, costs: Costs) -> list[float]:
        """Return what each sample of the dataset really takes, first to last."""
        if not self.sample_s:
            return [0.0]
        extra = costs.burn_extra_s if self.on_core else costs.sleep_extra_s
        slow = _slow(self.slow_share)
        if not slow:
            return [self.sample_s + extra]
        return [self.sample_s * (self.slow_times if index in slow else 1.0) + extra for index in range(DATASET_LENGTH)]

    def trainer(self, costs: Costs) -> Trainer:
        """Return the model of this configuration."""
        worker_costs = costs.worker_costs[self.shape]
        return Trainer(
            workers=self.workers,
            batch_size=self.batch_size,
            step_s=self.step_s + costs.sleep_extra_s if self.step_s else 0.0,
            handling_s=max(0.0, costs.handling_s - costs.result_s),
            result_s=costs.result_s,
            task_s=worker_costs.task_s,
            row_s=worker_costs.row_s,
            round_trip_s=self.round_trip_s + costs.sleep_extra_s if self.round_trip_s else 0.0,
            link_s=self.link_s + costs.sleep_extra_s / self.batch_size if self.link_s else 0.0,
            cores=costs.cores,
            on_core=self.on_core,
        )

    def dataset(self) -> Dataset[Tensor]:
        """Return its dataset."""
        return RemoteBatches(self) if self.in_bulk else CostlySamples(self)


class CostlySamples(Dataset[Tensor]):
    """Samples that are in memory and take as long as a configuration defines."""

    def __init__(self, config: LoopConfig) -> None:
        self.config = config
        self.inner = _pool(config.shape)
        self.slow = _slow(config.slow_share)

    def __len__(self) -> int:
        return DATASET_LENGTH

    def __getitem__(self, index: int) -> Tensor:
        config = self.config
        seconds = config.sample_s * (config.slow_times if index in self.slow else 1.0)
        if seconds and config.on_core:
            until = time.thread_time() + seconds  # CPU time of this thread, so that contention makes no sample cheaper
            while time.thread_time() < until:
                pass
        elif seconds:
            time.sleep(seconds)
        return self.inner[index]


class RemoteBatches(CostlySamples):
    """Batches that stand for another machine's: a round trip, and a link that one batch uses at a time."""

    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        self.link = mp.get_context("fork").Lock()

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        if self.config.round_trip_s:
            time.sleep(self.config.round_trip_s)
        samples = [self[index] for index in indices]
        if self.config.link_s:
            with self.link:
                time.sleep(self.config.link_s * len(indices))
        return samples


@cache
def _pool(shape: str) -> Pool:
    return Pool(SHAPES[shape], np.float32, DATASET_LENGTH)


@cache
def _slow(share: float) -> frozenset[int]:
    return frozenset(Random(SEED).sample(range(DATASET_LENGTH), round(share * DATASET_LENGTH)))


def loop_configs(cores: int, *, quick: bool) -> Iterator[LoopConfig]:
    """Yield the configurations for a machine with `cores` cores; where samples burn CPU, one core is the loop's."""
    most = max(1, cores - 1)
    asleep, on_core = "asleep, more workers", "on cores, more workers"
    for workers in (1, 2, 3) if quick else (1, 2, 4, 8, 16):
        yield LoopConfig(group=asleep, workers=workers, batch_size=16, sample_s=0.004)
    for workers in [*range(1, most + 1), *([] if quick else [cores + 2])]:
        yield LoopConfig(group=on_core, workers=workers, batch_size=16, sample_s=0.002, on_core=True)
    for batch_size in (2, 32, 64):
        yield LoopConfig(group="asleep, batches", workers=2, batch_size=batch_size, sample_s=0.002)
    for batch_size in (2, 32, 64):
        yield LoopConfig(group="on cores, batches", workers=2, batch_size=batch_size, sample_s=0.001, on_core=True)
    for step_s in (0.016, 0.04):
        yield LoopConfig(group="a step beside it", workers=3, batch_size=16, sample_s=0.004, step_s=step_s)
    for slow_times in (25.0, 100.0):
        yield LoopConfig(
            group="1 % slow, asleep",
            workers=3,
            batch_size=16,
            sample_s=0.001,
            slow_share=0.01,
            slow_times=slow_times,
            step_s=0.005,
        )
    for round_trip_s in (0.01, 0.04):
        yield LoopConfig(group="a round trip", workers=3, batch_size=16, sample_s=0.001, round_trip_s=round_trip_s)
    for link_s in (0.0005, 0.002):
        yield LoopConfig(group="a shared link", workers=3, batch_size=16, sample_s=0.002, link_s=link_s)
    for batch_size in (1, 16):
        yield LoopConfig(group="nothing but the loop", workers=2, batch_size=batch_size)
    for workers in (1, 2):
        yield LoopConfig(group="copies into slots", workers=workers, batch_size=32, shape="image")
