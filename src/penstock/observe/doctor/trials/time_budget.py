"""How long the trials of a loop may take, and how much of that has been spent."""

from __future__ import annotations

import time
from collections.abc import Callable


class TrialsDoneError(BaseException):
    """The trials are over: ends the loop. No program catches it by mistake, because it is no `Exception`."""


class TimeBudget:
    """Counts the time of the trials.

    Args:
        seconds: how long all trials may take.
        clock: seconds, monotonic.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = seconds
        self.clock = clock
        self._began_at = clock()

    def on_first_batch(self, now: float, least: float) -> None:
        """Count from `now`; what the first batch took is taken off, but at least the fraction `least` remains."""
        self.seconds = max(least * self.seconds, self.left_s(now))
        self._began_at = now

    def spent_s(self, now: float | None = None) -> float:
        """Return the seconds since the beginning."""
        return (self.clock() if now is None else now) - self._began_at

    def left_s(self, now: float | None = None) -> float:
        """Return the seconds that are left; negative once the time is over."""
        return self.seconds - self.spent_s(now)
