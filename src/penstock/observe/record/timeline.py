"""A run over time: points at regular intervals, each with the counters and gauges of that time.

A timeline keeps a bounded number of points, however long the run: when it is full, every second point is dropped and
the interval is doubled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.stats import StageTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelinePoint:
    """A run at one time. Batches, samples, bytes and seconds are counted from the start, over all loaders."""

    at_s: float
    """Seconds since the run's start."""

    batches: int = 0
    """Handed out so far."""

    samples: int = 0
    """Samples in those batches."""

    nbytes: int = 0
    """Bytes of those batches."""

    stages: StageTimes = field(default_factory=StageTimes)
    """Seconds by stage so far."""

    loading_s: float = 0.0
    """Seconds so far in which a loop waited for its data (without workers: in which it made the batches itself)."""

    ready: int = 0
    """Finished batches that were not handed out yet."""

    held: int = 0
    """Batches that the program still referred to."""

    workers: int = 0
    """Workers of running loops."""

    working: int = 0
    """Workers that had a task."""

    slots_nbytes: int = 0
    """Host memory of all loaders' slots."""

    host_nbytes: int | None = None
    """Host memory of all of the run's processes, a shared page counted once; None where it was not measured."""

    device_nbytes: int | None = None
    """Device memory of tensors; None without an accelerator."""

    device_peak_nbytes: int | None = None
    """The most device memory of tensors so far, also between points."""

    device_reserved_nbytes: int | None = None
    """Device memory that torch's allocator has reserved, cached blocks included."""

    device_utilization: float | None = None
    """Fraction of the driver's last sample period in which the device ran a kernel; None where unknown."""


class Timeline:
    """Collects points.

    Args:
        max_points: how many are kept; an even number.
        period_s: their initial interval.
    """

    def __init__(self, max_points: int = 1200, period_s: float = 0.5) -> None:
        self._max_points = max_points
        self._points: list[TimelinePoint] = []
        self.period_s = period_s

    def is_due(self, at_s: float) -> bool:
        """Return whether a point is due at `at_s` after the start."""
        return not self._points or at_s - self._points[-1].at_s >= self.period_s

    def add(self, point: TimelinePoint) -> None:
        """Add a point, later than all before it."""
        if len(self._points) == self._max_points:
            del self._points[1::2]
            self.period_s *= 2
        self._points.append(point)

    def points(self) -> tuple[TimelinePoint, ...]:
        """Return the kept points in the order of time."""
        return tuple(self._points)
