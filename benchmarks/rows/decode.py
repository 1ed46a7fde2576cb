"""Decode: JPEG files of 500x375, decoded by Pillow, cropped at random to 224x224 and flipped, in batches of 64.

The workers' cores are the bound: as many plain processes, which decode and crop the same files and do nothing else, are
the ceiling.
"""

from __future__ import annotations

from benchmarks.contestants import TORCH
from benchmarks.figures import Result, Target, compare
from benchmarks.jpegs import jpeg_workload
from benchmarks.race import Plan, race

CEILING = "decode ceiling"


def row(plan: Plan) -> list[Result]:
    """Race over JPEG files with two workers, beside the ceiling."""
    targets = [Target(against=TORCH.name, at_least=1), Target(against=CEILING, at_least=0.95)]
    with jpeg_workload(20 if plan.quick else 60) as workload:
        ran = race(plan, workload, bound=CEILING)
        figures = ran.figures(lambda lap: workload.samples / lap.seconds)
        return [compare("decode", workload.name, "samples/s", figures, targets, ran.notes)]
