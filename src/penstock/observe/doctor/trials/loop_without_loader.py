"""The loop of a program that makes its batches by itself: a step is from one `optimizer.step()` to the next.

```
 waits ──enough steps, and no training over a DataLoader──▶ CALLS ──▶ LINES ──▶ TIMING ──▶ TrialsDoneError
                                                some steps observed   seen      untouched
```
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from penstock.observe.doctor.probes.line_sampler import LineSampler
from penstock.observe.doctor.probes.steps.memory_growth import MemoryWatch
from penstock.observe.doctor.probes.steps.step_calls import StepCallRecorder
from penstock.observe.doctor.step_results import MemoryGrowth
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.doctor.trial import AS_IS, Trial
from penstock.observe.doctor.trials.loop_frames import users_frames
from penstock.observe.doctor.trials.time_budget import TrialsDoneError
from penstock.observe.doctor.trials.window_timer import WindowTimer

_LINES, _LEAST_TIMED = 0.4, 0.3
"""Of the time, what is looked at after the observed steps, and what is timed at least."""


class LoopWithoutLoader:
    """Measures a program's steps, by its first optimizer.

    Args:
        seconds: how long to take, after the first steps.
        clock: seconds, monotonic.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.began_at: float | None = None
        """When the program was known to train so; None before that."""
        self.step_calls = StepCallRecorder()
        self.step_lines = LineSampler()
        self.memory_growth: MemoryGrowth | None = None
        self._seconds = seconds
        self._clock = clock
        self._timer = WindowTimer(clock)
        self._memory = MemoryWatch()
        self._windows: list[Any] = []
        self._optimizer: int | None = None
        self.steps = 0
        """How many its first optimizer has made."""
        self._first_at = 0.0
        self._looks_since: float | None = None
        self._window_s = 0.0

    def note_step(self, optimizer: object) -> None:
        """Note that an optimizer of the program has made a step.

        Raises:
            TrialsDoneError: there were enough.
        """
        now = self._clock()
        if self._optimizer is None:
            self._optimizer, self._first_at = id(optimizer), now
        if id(optimizer) != self._optimizer:
            return
        self.steps += 1
        if self.began_at is not None:
            self._advance(now)
        elif self.steps > THRESHOLDS.bare_steps and now - self._first_at > self._patience_s():
            self.began_at = now
            self.step_calls.enter()

    def tick(self) -> None:
        """Check the time; called by an alarm.

        Raises:
            TrialsDoneError: it is over.
        """
        most_s = (1 + _LEAST_TIMED) * self._seconds + THRESHOLDS.overrun_s
        if self.began_at is not None and self._clock() - self.began_at > most_s:
            self._end()

    def trial(self) -> Trial:
        """Return the loop, timed as it is."""
        return Trial(name=AS_IS, windows=tuple(self._windows))

    def close(self) -> None:
        """Look no more."""
        self.step_calls.leave()
        self.step_lines.stop()

    def _patience_s(self) -> float:
        return min(THRESHOLDS.no_gradient_loop_s, 0.3 * self._seconds)

    def _advance(self, now: float) -> None:
        self.step_calls.leave()
        assert self.began_at is not None
        if self._window_s:
            self._time_step(now)
        elif self._looks_since is None and self.step_calls.steps < THRESHOLDS.observed_steps:
            self.step_calls.enter()
        elif self._looks_since is None or now - self._looks_since < _LINES * self._seconds:
            self._looks_since = now if self._looks_since is None else self._looks_since
            self.step_lines.turn = self.steps
            self.step_lines.start()
        else:
            self.step_lines.stop()
            left_s = max(_LEAST_TIMED * self._seconds, self.began_at + self._seconds - now)
            self._window_s = left_s / THRESHOLDS.windows_per_source
            self._begin_window()

    def _time_step(self, now: float) -> None:
        self._timer.on_request(now)
        self._timer.on_return(now, now)
        if self._timer.elapsed_s(now) < self._window_s:
            return
        self._windows.append(self._timer.window(now))
        self._memory.end_window(self._timer.batches, users_frames(sys._getframe()))
        if len(self._windows) >= THRESHOLDS.windows_per_source:
            self._end()
        self._begin_window()

    def _begin_window(self) -> None:
        self._memory.begin_window(users_frames(sys._getframe()))
        self._timer.restart()
        self._timer.on_return(self._clock(), self._clock())

    def _end(self) -> None:
        self.memory_growth = self._memory.result(users_frames(sys._getframe()))
        raise TrialsDoneError
