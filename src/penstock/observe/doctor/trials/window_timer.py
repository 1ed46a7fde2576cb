"""Times one window: the batches in a row that a loop takes from one source."""

from __future__ import annotations

from collections.abc import Callable

from penstock.observe.doctor.probes import proc
from penstock.observe.doctor.trial import TimingWindow


class WindowTimer:
    """Splits a loop's time into waiting for batches and working on them.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at = clock()
        self._queued_s = 0.0
        self._wait_s = 0.0
        self._step_s = 0.0
        self._start_s = 0.0
        self.batches = 0
        self.returned_at: float | None = None
        """When the loop got the batch that it works on; None where that step does not count."""
        self.requested_at = self._began_at
        """When the loop requested a batch last; before the first request, when the window began."""

    def restart(self) -> None:
        """Begin a new window."""
        self._began_at = self.requested_at = self._clock()
        self._queued_s = proc.thread_times().queued_s
        self.batches, self._wait_s, self._step_s, self._start_s = 0, 0.0, 0.0, 0.0

    def skip_step(self) -> None:
        """Leave out the step that the loop is in: it belongs to the window before."""
        self.returned_at = None

    def on_request(self, now: float) -> None:
        """Count the step that ends with the loop's request for another batch."""
        self.requested_at = now
        if self.returned_at is not None:
            self._step_s += now - self.returned_at
            self.batches += 1

    def on_return(self, requested_at: float, now: float, start_s: float = 0.0) -> None:
        """Count the wait that ends with a batch; an epoch began with it, for `start_s`."""
        self._start_s += start_s
        self.returned_at = now
        self._wait_s += now - requested_at

    def elapsed_s(self, now: float) -> float:
        """Return how long the window has taken until `now`."""
        return now - self._began_at

    def window(self, now: float) -> TimingWindow:
        """Return the window, as if it ended at `now`."""
        return TimingWindow(
            batches=self.batches,
            wall_s=max(1e-9, self.elapsed_s(now)),
            wait_s=self._wait_s,
            step_s=self._step_s,
            start_s=min(self._start_s, self._wait_s),
            queued_s=max(0.0, proc.thread_times().queued_s - self._queued_s),
        )
