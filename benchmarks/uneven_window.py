"""What a wider window gains where batches are uneven: `python -m benchmarks.uneven_window`.

A simulation: 400 batches whose times are lognormal (sigma 1), a step that costs nothing, batches handed out in order.
The figures are fractions of the rate that the workers would have if none ever waited.
"""

from __future__ import annotations

import random

PREFETCH_FACTOR = 2
BATCHES = 400


def rate(times: list[float], workers: int, window: int, *, on_demand: bool) -> float:
    """Return the rate, as a fraction of the ideal.

    >>> rate([3.0, 1.0, 1.0, 1.0], workers=2, window=2, on_demand=False)
    0.75
    """
    free, handed_out = [0.0] * workers, [0.0]
    for number, time in enumerate(times):
        worker = min(range(workers), key=free.__getitem__) if on_demand else number % workers
        free[worker] = max(free[worker], handed_out[max(0, number + 1 - window)]) + time
        handed_out.append(max(free[worker], handed_out[-1]))
    return sum(times) / workers / handed_out[-1]


def main() -> None:
    """Print a line for each number of workers."""
    draw = random.Random(1)
    times = [draw.lognormvariate(0, 1) for _ in range(BATCHES)]
    print("workers  torch's window  twice  four times  eight times  on demand, torch's window")
    for workers in (2, 4, 8):
        torchs = PREFETCH_FACTOR * workers
        wider = [rate(times, workers, torchs * more, on_demand=False) for more in (1, 2, 4, 8)]
        print(workers, *(f"{one:.2f}" for one in (*wider, rate(times, workers, torchs, on_demand=True))), sep="\t")


if __name__ == "__main__":
    main()
