"""Predict loop configurations, and measure them over the same batches that were predicted."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.scaling.costs import (
    Costs,
    WorkerCost,
    burn_extra_s,
    copy_gb_per_s,
    line,
    measure_image,
    receive_gb_per_s,
    sleep_extra_s,
)
from benchmarks.scaling.loop_configs import DATASET_LENGTH, LoopConfig
from benchmarks.scaling.simulation import simulated_pace
from benchmarks.scaling.trainer import pace
from penstock import DataLoader

_WARM_UP_S = 0.3
_WARM_UP_BATCHES = 8
_MIN_BATCHES = 20
"""Batches, at least: to warm up, and to time."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction for a configuration, made before it is measured; samples per second."""

    formula: float
    simulated: float
    bound: str
    skip: int
    """Batches that are not timed, because the queues are still filling."""
    batches: int
    """Batches that are timed."""


@dataclass(frozen=True, kw_only=True)
class LoopTiming:
    """The time of a range of batches, per batch."""

    batch_s: float
    loop_cpu_s: float
    """CPU time of the loop's process, per batch."""


def predict(config: LoopConfig, costs: Costs, seconds: float) -> Prediction:
    """Predict `config`, over as many batches as take about `seconds`."""
    trainer, samples_s = config.trainer(costs), config.samples_s(costs)
    formula = pace(trainer, sum(samples_s) / len(samples_s))
    batches_per_s = formula.samples_per_s / config.batch_size
    most = DATASET_LENGTH // config.batch_size
    skip = min(most // 4, max(_WARM_UP_BATCHES, 4 * config.workers, math.ceil(_WARM_UP_S * batches_per_s)))
    batches = min(most - skip - 1, max(_MIN_BATCHES, math.ceil(seconds * batches_per_s)))
    simulated = simulated_pace(trainer, samples_s, skip=skip, batches=batches)
    return Prediction(
        formula=formula.samples_per_s,
        simulated=simulated.samples_per_s,
        bound=formula.bound,
        skip=skip,
        batches=batches,
    )


def time_loop(config: LoopConfig, *, skip: int, batches: int) -> LoopTiming:
    """Run `config` on penstock's DataLoader and time `batches` of it."""
    gc.collect()
    loader = DataLoader(config.dataset(), batch_size=config.batch_size, num_workers=config.workers, dispatch="demand")
    iterator = iter(loader)
    next(iterator)
    _run_batches(iterator, config.step_s, skip)
    began, cpu = time.perf_counter(), time.process_time()
    _run_batches(iterator, config.step_s, batches)
    took, ran = time.perf_counter() - began, time.process_time() - cpu
    del iterator, loader
    gc.collect()
    return LoopTiming(batch_s=took / batches, loop_cpu_s=ran / batches)


def _run_batches(iterator: Iterator[object], step_s: float, batches: int) -> None:
    """Run the step for `batches` batches, and fetch the next one after each."""
    for _ in range(batches):
        if step_s:
            time.sleep(step_s)
        next(iterator)


def calibrate(cores: int) -> Costs:
    """Measure the costs on this machine; takes about ten seconds."""
    handling_s = min(time_loop(_NO_WORK, skip=200, batches=1500).batch_s for _ in range(3))
    whole, split = (time_loop(config, skip=24, batches=48).loop_cpu_s for config in (_WHOLE, _SPLIT))
    # In these two the loop sleeps until a result arrives, and waking up costs more than handling the result. A loop
    # that never sleeps does not pay for that, so the cost of a result is limited to that of a whole batch.
    result_s = min(handling_s, max(0.0, split - whole) / (_SPLIT.workers - 1))
    return Costs(
        cores=cores,
        sleep_extra_s=sleep_extra_s(),
        burn_extra_s=burn_extra_s(),
        handling_s=handling_s,
        result_s=result_s,
        worker_costs={"small": _worker_cost("small", (8, 256), 200), "image": _worker_cost("image", (16, 64), 60)},
        copy_gb_per_s=copy_gb_per_s(),
        receive_gb_per_s=receive_gb_per_s(),
        image=measure_image(),
    )


_NO_WORK = LoopConfig(group="", workers=2, batch_size=4)
_WHOLE = LoopConfig(group="", workers=3, batch_size=12, sample_s=0.001, round_trip_s=0.0001)
_SPLIT = replace(_WHOLE, round_trip_s=0.0)
"""The same batches: each made by one worker, and each split over all three."""


def _worker_cost(shape: str, sizes: tuple[int, int], batches: int) -> WorkerCost:
    """Measure one worker that is slower than the loop, with two batch sizes."""
    small, large = (
        min(
            time_loop(LoopConfig(group="", workers=1, batch_size=size, shape=shape), skip=12, batches=batches).batch_s
            for _ in range(3)
        )
        for size in sizes
    )
    task_s, row_s = line((float(sizes[0]), float(sizes[1])), (small, large))
    return WorkerCost(task_s=task_s, row_s=row_s)
