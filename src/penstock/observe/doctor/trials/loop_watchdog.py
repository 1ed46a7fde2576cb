"""Ends a loop that takes too long or hangs; called by an alarm, wherever the loop is."""

from __future__ import annotations

import math
from collections.abc import Callable

from penstock.observe.doctor.probe_results import Hang
from penstock.observe.doctor.probes.worker_activity import HangDetector
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.doctor.trials.time_budget import TimeBudget, TrialsDoneError


class LoopWatchdog:
    """Knows how long the loop has been waiting for its batch.

    Args:
        budget: the trials' time.
    """

    def __init__(self, budget: TimeBudget) -> None:
        self._budget = budget
        self._detector = HangDetector()
        self._waits_since = math.inf
        self._longest_wait_s = 0.0
        self._has_batch = False
        self.hang: Hang | None = None
        """Set once all workers were found blocked."""

    def begin_wait(self, now: float) -> None:
        """Note that the loop waits from `now` on."""
        self._waits_since = now

    def end_wait(self) -> None:
        """Note that the wait is over, with a batch or an exception."""
        self._waits_since = math.inf

    def note_batch(self, waited_s: float) -> None:
        """Note how long the loop waited for a batch."""
        self._has_batch = True
        self._longest_wait_s = max(self._longest_wait_s, waited_s)

    def check(self, workers: Callable[[], list[int]]) -> None:
        """End the loop if its time is over, or if the workers that it waits for are blocked.

        Args:
            workers: returns their process ids.

        Raises:
            TrialsDoneError: in either case.
        """
        now, limits = self._budget.clock(), THRESHOLDS
        if self._budget.spent_s(now) > self._limit_s() and not self._detector.is_suspicious:
            raise TrialsDoneError
        waits_s = now - self._waits_since
        if waits_s > limits.hang_wait_s:
            self.hang = self._detector.check(workers(), now, waits_s)
            if self.hang is not None:
                raise TrialsDoneError

    def _limit_s(self) -> float:
        seconds, limits = self._budget.seconds, THRESHOLDS
        if self._has_batch:
            return seconds * limits.overrun + limits.overrun_s
        return max(seconds * limits.first_batch, limits.first_batch_s)

    def is_blocked(self) -> bool:
        """Return whether the loop waits so much longer than ever before that a paused worker may block it."""
        waits_s = self._budget.clock() - self._waits_since
        return waits_s > max(THRESHOLDS.blocked_source_s, 3 * self._longest_wait_s)
