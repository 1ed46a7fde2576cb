"""One trainer and its workers: a formula for what bounds the throughput. Times are in seconds.

The formula uses means only. `simulation` covers the cost of a bounded window, of batches in order and of slow samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A loop, its workers, and what a batch costs each of them; all times are seconds.

    >>> Trainer(workers=0, batch_size=8)
    Traceback (most recent call last):
        ...
    ValueError: a trainer needs at least 1 worker, workers is 0
    """

    workers: int
    batch_size: int

    step_s: float = 0.0
    """The loop's own time for a batch."""

    handling_s: float = 0.0
    """The loop's thread, for a batch: sending tasks, receiving results, wrapping tensors."""

    result_s: float = 0.0
    """The loop's thread, for each result of a batch."""

    task_s: float = 0.0
    """A worker, for a task of any size: fetching it, sending its result."""

    round_trip_s: float = 0.0
    """The round trip to another machine, while the worker waits."""

    row_s: float = 0.0
    """A worker, for a sample, in addition to making it: the copy into its slot."""

    link_s: float = 0.0
    """A sample's time on a link that all workers share."""

    cores: float = inf
    """Processors that workers and loop share."""

    on_core: bool = False
    """Whether making a sample uses one of them; otherwise its worker sleeps, as if another machine made it."""

    prefetch_factor: int = 2
    """The most batches in flight for each worker."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"a trainer needs at least 1 worker, workers is {self.workers}")
        if self.batch_size < 1 or self.prefetch_factor < 1:
            raise ValueError(
                f"batch_size={self.batch_size} and prefetch_factor={self.prefetch_factor}: both must be at least 1"
            )


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The throughput of a trainer."""

    samples_per_s: float
    bound: str
    """The bottleneck: "workers", "loop", "link" or "cores"."""


def pace(trainer: Trainer, sample_s: float) -> Pace:
    """Return the pace of `trainer` when a sample takes `sample_s` seconds to make: that of its slowest part.

    By hand: 4 workers, batches of 10, samples of 20 ms and a step of 100 ms: the workers make 4 / 0.020 = 200
    samples a second, the loop takes 10 / 0.100 = 100.

    >>> pace(Trainer(workers=4, batch_size=10, step_s=0.1), 0.02)
    Pace(samples_per_s=100.0, bound='loop')
    """
    batch = trainer.batch_size
    work_s = trainer.task_s + trainer.round_trip_s + batch * (sample_s + trainer.row_s)
    loop_s = trainer.handling_s + trainer.result_s + trainer.step_s
    on_core_s = trainer.task_s + batch * (trainer.row_s + (sample_s if trainer.on_core else 0.0))
    on_core_s += trainer.handling_s + trainer.result_s
    seconds = {
        "workers": (work_s + batch * trainer.link_s) / trainer.workers,
        "loop": loop_s,
        "link": batch * trainer.link_s,
        "cores": on_core_s / trainer.cores,
    }
    bound = max(seconds, key=lambda part: seconds[part])
    return Pace(samples_per_s=batch / seconds[bound] if seconds[bound] else inf, bound=bound)
