"""Slow samples: one in a hundred takes a hundred times as long as the rest, at the same indices in every run.

An ordinary sample copies a float image and takes 0.15 ms of CPU in all, a slow one 15 ms. The slow ones sleep, as if
they waited for storage, or burn CPU. The ideal is the time of all samples divided by the number of workers, measured in
plain processes that do nothing else. Penstock is also measured with dispatch="demand".
"""

from __future__ import annotations

from benchmarks.adapters import ON_DEMAND, TORCH
from benchmarks.benchmark_result import Result, Target
from benchmarks.interleaved import RunOptions, rates, time_loaders
from benchmarks.workloads import Copied, Slow, Workload, copied, images

ORDINARY_S = 0.15e-3
IDEAL = "ideal"


def run(options: RunOptions) -> list[Result]:
    """Time slow samples that sleep, then slow samples that burn CPU."""
    ordinary = copied(images(30 if options.quick else 80))
    assert isinstance(ordinary.dataset, Copied)
    results: list[Result] = []
    for burn, name in ((False, "1 % slow, asleep"), (True, "1 % slow, burning")):
        if options.only not in name:
            continue
        dataset = Slow(ordinary.dataset, ordinary_s=ORDINARY_S, burn=burn)
        workload = Workload(name=name, dataset=dataset, batch_size=ordinary.batch_size, batches=ordinary.batches)
        ran = time_loaders(options, workload, bound=IDEAL, also=(ON_DEMAND,))
        results += rates(options, "slow", name, workload, ran, [Target(against=TORCH.name, at_least=2)])
    return results
