"""Laps over points: predicted first, then measured over just the batches that were predicted."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.scaling.costs import (
    Costs,
    Making,
    burn_extra_s,
    copy_gb_per_s,
    line,
    picture,
    receive_gb_per_s,
    sleep_extra_s,
)
from benchmarks.scaling.points import LENGTH, Point
from benchmarks.scaling.simulation import simulated_pace
from benchmarks.scaling.trainer import pace
from penstock import DataLoader

_WARM_S = 0.3
_WARM = 8
_FEWEST = 20
"""Batches, at least: to warm up, and to time."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a point will do, said before it is measured; samples per second."""

    formula: float
    simulated: float
    bound: str
    skip: int
    """Batches that are not timed, for they come while the queues fill."""
    batches: int
    """Batches that are timed."""


@dataclass(frozen=True, kw_only=True)
class Lap:
    """A stretch of a loop: seconds for each batch."""

    batch_s: float
    loop_cpu_s: float
    """What the loop's process ran."""


def predict(point: Point, costs: Costs, seconds: float) -> Prediction:
    """Predict `point`, over as many batches as take about `seconds`."""
    trainer, samples_s = point.trainer(costs), point.samples_s(costs)
    formula = pace(trainer, sum(samples_s) / len(samples_s))
    batches_per_s = formula.samples_per_s / point.batch_size
    most = LENGTH // point.batch_size
    skip = min(most // 4, max(_WARM, 4 * point.workers, math.ceil(_WARM_S * batches_per_s)))
    batches = min(most - skip - 1, max(_FEWEST, math.ceil(seconds * batches_per_s)))
    simulated = simulated_pace(trainer, samples_s, skip=skip, batches=batches)
    return Prediction(
        formula=formula.samples_per_s,
        simulated=simulated.samples_per_s,
        bound=formula.bound,
        skip=skip,
        batches=batches,
    )


def lap(point: Point, *, skip: int, batches: int) -> Lap:
    """Run `point` on penstock's DataLoader and time `batches` of it."""
    gc.collect()
    loader = DataLoader(point.dataset(), batch_size=point.batch_size, num_workers=point.workers)
    iterator = iter(loader)
    next(iterator)
    _go_on(iterator, point.step_s, skip)
    began, cpu = time.perf_counter(), time.process_time()
    _go_on(iterator, point.step_s, batches)
    took, ran = time.perf_counter() - began, time.process_time() - cpu
    del iterator, loader
    gc.collect()
    return Lap(batch_s=took / batches, loop_cpu_s=ran / batches)


def _go_on(iterator: Iterator[object], step_s: float, batches: int) -> None:
    """Use the batch at hand and take the next one, so many times."""
    for _ in range(batches):
        if step_s:
            time.sleep(step_s)
        next(iterator)


def calibrate(cores: int) -> Costs:
    """Measure what this machine's parts cost; takes some ten seconds."""
    handling_s = min(lap(_FREE, skip=200, batches=1500).batch_s for _ in range(3))
    whole, parted = (lap(point, skip=24, batches=48).loop_cpu_s for point in (_WHOLE, _PARTED))
    # In these two the loop sleeps until a piece is there, and waking takes it longer than the piece; a loop that has no
    # time to sleep does not wake either. So a piece is never held to cost more than a batch.
    report_s = min(handling_s, max(0.0, parted - whole) / (_PARTED.workers - 1))
    return Costs(
        cores=cores,
        sleep_extra_s=sleep_extra_s(),
        burn_extra_s=burn_extra_s(),
        handling_s=handling_s,
        report_s=report_s,
        making={"small": _making("small", (8, 256), 200), "picture": _making("picture", (16, 64), 60)},
        copy_gb_per_s=copy_gb_per_s(),
        receive_gb_per_s=receive_gb_per_s(),
        picture=picture(),
    )


_FREE = Point(row="", workers=2, batch_size=4)
_WHOLE = Point(row="", workers=3, batch_size=12, sample_s=0.001, trip_s=0.0001)
_PARTED = replace(_WHOLE, trip_s=0.0)
"""The same batches, made by one worker each, and by all three together."""


def _making(shape: str, sizes: tuple[int, int], batches: int) -> Making:
    """Measure one worker that is slower than the loop, with two sizes of batches."""
    small, large = (
        min(
            lap(Point(row="", workers=1, batch_size=size, shape=shape), skip=12, batches=batches).batch_s
            for _ in range(3)
        )
        for size in sizes
    )
    piece_s, row_s = line((float(sizes[0]), float(sizes[1])), (small, large))
    return Making(piece_s=piece_s, row_s=row_s)
