"""Decode: JPEG files of 500x375, decoded by Pillow, cropped at random to 224x224 and flipped, in batches of 64.

The bound is the workers' cores. The ceiling is the same number of plain processes, which decode and crop the same files
and do nothing else.
"""

from __future__ import annotations

from benchmarks.adapters import TORCH
from benchmarks.benchmark_result import Result, Target
from benchmarks.interleaved import RunOptions, rates, time_loaders
from benchmarks.jpegs import jpeg_workload

CEILING = "decode ceiling"


def run(options: RunOptions) -> list[Result]:
    """Time JPEG files with two workers, and the ceiling."""
    targets = [Target(against=TORCH.name, at_least=1), Target(against=CEILING, at_least=0.95)]
    with jpeg_workload(20 if options.quick else 60) as workload:
        ran = time_loaders(options, workload, bound=CEILING)
        return rates(options, "decode", workload.name, workload, ran, targets)
