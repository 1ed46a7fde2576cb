"""The scenarios of the page, and uneven samples. Figures are assumptions unless a scenario lists them as measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from random import Random

from benchmarks.scaling.costs import Costs
from benchmarks.scaling.fleet import GIGABIT, Machines, Work
from benchmarks.scaling.simulation import simulated_pace
from benchmarks.scaling.trainer import Trainer

GPUS = (8, 64, 1024)
EXAMPLE = Work(sample_s=0.012, sample_nbytes=600_000, stored_nbytes=110_000, batch_size=256, step_s=0.18)
_SEED = 20_24
_BATCHES = 300


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Named work."""

    name: str
    work: Work
    measured: str = ""
    """Which of its figures were measured; the others are assumptions."""


def machines_of(costs: Costs) -> Machines:
    """Return machines whose trainers handle and receive batches at the measured speed."""
    return Machines(copy_gb_per_s=costs.receive_gb_per_s, handling_s=costs.handling_s)


def scenarios(costs: Costs) -> Iterator[Scenario]:
    """Yield the scenarios of the page."""
    yield Scenario(name="costly images, float32", work=EXAMPLE)
    bytes_each = 3 * 224 * 224
    yield Scenario(
        name="the same, sent as uint8",
        work=Work(sample_s=0.012, sample_nbytes=bytes_each, stored_nbytes=110_000, batch_size=256, step_s=0.18),
    )
    yield Scenario(
        name="JPEG decode and crop, uint8",
        work=Work(
            sample_s=costs.image.decode_s,
            sample_nbytes=bytes_each,
            stored_nbytes=costs.image.stored_nbytes,
            batch_size=256,
            step_s=0.18,
        ),
        measured="CPU per sample, stored bytes",
    )
    clip = 16 * bytes_each
    yield Scenario(
        name="video clips, 16 frames, uint8",
        work=Work(sample_s=0.12, sample_nbytes=clip, stored_nbytes=500_000, batch_size=16, step_s=0.25),
    )
    yield Scenario(
        name="tokens, 2 048 as int64",
        work=Work(sample_s=0.0002, sample_nbytes=2048 * 8, stored_nbytes=2048 * 4, batch_size=16, step_s=0.4),
    )


def gpu_share(work: Work, machines: Machines, *, slow_share: float, slow_times: float) -> float:
    """Return the share of its time that one GPU computes, by simulation, when samples are uneven.

    `slow_share` of the samples take `slow_times` as long as the others; the mean is still `work.sample_s`. The GPU has
    as many cores as formula and `machines.fill` give it; one core makes a batch, two batches for each are in flight.

    Even samples and cores to spare: the GPU never waits.

    >>> round(gpu_share(EXAMPLE, Machines(), slow_share=0.0, slow_times=1.0), 3)
    1.0
    """
    cores = ceil(work.batch_size * work.sample_s / work.step_s / machines.fill)
    ordinary_s = work.sample_s / (1 + slow_share * (slow_times - 1))
    draw = Random(_SEED)
    samples_s = [
        ordinary_s * (slow_times if draw.random() < slow_share else 1.0) for _ in range(_BATCHES * work.batch_size)
    ]
    trainer = Trainer(
        workers=cores,
        batch_size=work.batch_size,
        step_s=work.step_s,
        round_trip_s=machines.latency_s + work.batch_size * work.sample_nbytes / (machines.gbit * GIGABIT),
    )
    found = simulated_pace(trainer, samples_s, skip=4 * cores, batches=_BATCHES)
    return found.samples_per_s * work.step_s / work.batch_size
