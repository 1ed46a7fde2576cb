"""The schedule of one loop's trials: warm up, then timing windows that alternate between sources.

```
 WARM_UP ──enough batches──▶ start all sources ──▶ TIMING ──window over──▶ next source ──time over──▶ TrialsDoneError
    the loop's own loader;                           │  ▲
    some steps are observed              interrupted ▼  │ next request
                                          window kept or discarded
```
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock.core.random_states import keep_states
from penstock.observe.doctor.contents.seen_labels import LabelRecorder
from penstock.observe.doctor.probes.batch_values import copy_containers
from penstock.observe.doctor.probes.line_sampler import LineSampler
from penstock.observe.doctor.probes.steps.memory_growth import MemoryWatch
from penstock.observe.doctor.probes.steps.step_calls import StepCallRecorder
from penstock.observe.doctor.probes.worker_activity import WorkerActivityProbe
from penstock.observe.doctor.step_results import MemoryGrowth
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.doctor.trial import AS_IS, Trial
from penstock.observe.doctor.trials.batch_source import BatchSource
from penstock.observe.doctor.trials.loop_frames import users_frames
from penstock.observe.doctor.trials.loop_watchdog import LoopWatchdog
from penstock.observe.doctor.trials.source_rotation import SourceRotation
from penstock.observe.doctor.trials.stream_comparison import StreamComparison
from penstock.observe.doctor.trials.time_budget import TimeBudget, TrialsDoneError
from penstock.observe.doctor.trials.window_timer import WindowTimer


class _Phase(Enum):
    WARM_UP = auto()
    TIMING = auto()


class _Interruption(Enum):
    NONE = auto()
    WINDOW_DISCARDED = auto()
    WINDOW_KEPT = auto()


class LoopSession:
    """Answers one loop's requests for batches, and measures it meanwhile.

    Args:
        loader: what the loop iterates over.
        sources: the first is the loop's own loader.
        budget: the trials' time.
        step_calls: observes some steps of the warm-up.
        activity: observes the workers while the loop runs unchanged.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sources: Sequence[BatchSource],
        budget: TimeBudget,
        step_calls: StepCallRecorder,
        activity: WorkerActivityProbe,
    ) -> None:
        self.loader = loader
        self.batch: Any = None
        self.watchdog = LoopWatchdog(budget)
        self.comparison = StreamComparison(loader)
        self.labels = LabelRecorder()
        self.is_complete = False
        """Whether all trials are over, and nothing but their time has ended them."""
        self.step_lines = LineSampler()
        """Of the warm-up's steps, which are not timed."""
        self._observed_lines = LineSampler()
        """Of the first steps, and those whose calls are recorded, which makes small calls look dear."""
        self.memory_growth: MemoryGrowth | None = None
        """What the program keeps of every step; known when the trials are complete."""
        self._memory = MemoryWatch()
        self._budget = budget
        self._step_calls = step_calls
        self._activity = activity
        self._timer = WindowTimer(budget.clock)
        self._rotation = SourceRotation(sources, budget, self.watchdog)
        self._phase = _Phase.WARM_UP
        self._interruption = _Interruption.NONE
        self._warm_up_batches = 0
        self._window_s = 0.0
        self._has_started = False

    def start(self) -> None:
        """Start what has to be started before the loop's first batch, which is the one that it gets without trials."""
        with keep_states(), _keep_generators(self.loader):
            self._rotation.start_processes_first()
        self._timer.restart()

    def next_batch(self) -> Any:
        """Return the loop's next batch, from whichever source is to feed it now.

        Raises:
            TrialsDoneError: all trials are over.
            Exception: from the loop's own loader.
        """
        now = self._budget.clock()
        self._step_calls.leave()
        if self._interruption is not _Interruption.NONE:
            self._resume()
        self._timer.on_request(now)
        self._advance(now)
        requested_at = self._budget.clock()
        self.watchdog.begin_wait(requested_at)
        try:
            batch = self._draw()
        finally:
            self.watchdog.end_wait()
            now = self._budget.clock()
            if self._rotation.current.startup_s is not None and not self._has_started:
                self._has_started = True
                requested_at = now  # however long its workers took to start
                self._budget.on_first_batch(now, THRESHOLDS.left_after_start)
                self._timer.restart()
            self._timer.on_return(requested_at, now, self._rotation.current.start_s)
        self.watchdog.note_batch(now - requested_at)
        if self._phase is _Phase.WARM_UP:
            has_observed = self._step_calls.steps >= THRESHOLDS.observed_steps
            if self._observes_step(now):
                self._step_calls.enter(batch)
            self._look_at_lines(self.step_lines if has_observed else self._observed_lines)
        return batch

    def _look_at_lines(self, sampler: LineSampler) -> None:
        self._stop_looking()
        sampler.turn = self._warm_up_batches
        sampler.start()

    def _stop_looking(self) -> None:
        self.step_lines.stop()
        self._observed_lines.stop()

    def tick(self) -> None:
        """Check the time and the workers; called by an alarm, between any two instructions of the loop.

        Raises:
            TrialsDoneError: the time is over, or the workers hang.
        """
        self.watchdog.check(lambda: self._rotation.current.workers())
        if self.watchdog.is_blocked() and self._rotation.stop_pausing():
            self._discard_window()

    def interrupt(self) -> None:
        """End the window here, because the program does something else, such as a validation."""
        if self._interruption is not _Interruption.NONE:
            return
        returned_at = self._timer.returned_at
        is_long_enough = self._timer.batches >= THRESHOLDS.cut_window_batches
        if self._phase is _Phase.TIMING and returned_at is not None and is_long_enough:
            # Without the last batch: its step may have ended long ago.
            self._keep_window(returned_at)
            self._interruption = _Interruption.WINDOW_KEPT
        else:
            self._discard_window()

    def trials(self) -> tuple[Trial, ...]:
        """Return what every source has shown."""
        if self._timer.batches and not self._rotation.has_windows:  # the warm-up, or the time, was over before one was
            self._keep_window(self._timer.requested_at)
        return self._rotation.trials()

    def rest(self) -> None:
        """Stop the workers of the source that has fed the loop last."""
        self._rotation.rest()

    def close(self) -> None:
        """Close all sources."""
        self._stop_looking()
        self._rotation.close()

    def _discard_window(self) -> None:
        if self._interruption is _Interruption.NONE:
            self._interruption = _Interruption.WINDOW_DISCARDED

    def _resume(self) -> None:
        """Start a window at the first request after an interruption."""
        was_kept = self._interruption is _Interruption.WINDOW_KEPT
        self._interruption = _Interruption.NONE
        self._timer.skip_step()
        if was_kept:
            self._next_window()
        else:
            self._timer.restart()

    def _advance(self, now: float) -> None:
        """Start the next window if this one is over; end the loop after the last one."""
        if self._phase is _Phase.WARM_UP:
            if self._is_warm(now):
                self._begin_timing()
        elif self._timer.batches and self._timer.elapsed_s(now) >= self._window_s:
            self._keep_window(now)
            if self._budget.spent_s(now) > self._budget.seconds and not self._rotation.lacks_free_loading:
                self.is_complete = True
                self.memory_growth = self._memory.result(users_frames(sys._getframe()))
                raise TrialsDoneError
            self._next_window()

    def _is_warm(self, now: float) -> bool:
        """Count a batch of the warm-up; return whether it was the last one."""
        if self._timer.returned_at is None:
            return False
        self._warm_up_batches += 1
        spent_s, seconds = self._budget.spent_s(now), self._budget.seconds
        has_enough = self._warm_up_batches >= THRESHOLDS.warm_up_batches + THRESHOLDS.observed_steps
        has_looked = self.step_lines.looks >= THRESHOLDS.line_looks
        if spent_s < seconds / 4:
            return has_enough and has_looked and not self.comparison.lacks_batches and spent_s > seconds / 10
        if self._step_calls.steps >= THRESHOLDS.observed_steps and not has_looked and spent_s < seconds / 3:
            return False
        has_observed = self._step_calls.steps > 0 and not self.comparison.lacks_batches
        return has_observed or spent_s > 0.75 * seconds

    def _observes_step(self, now: float) -> bool:
        """Return whether the calls of the next step are recorded: after the warm-up, and sooner if steps are slow."""
        is_slow = self._budget.spent_s(now) > self._budget.seconds / 8
        first = 1 if is_slow else THRESHOLDS.warm_up_batches
        return self._warm_up_batches >= first and self._step_calls.steps < THRESHOLDS.observed_steps

    def _begin_timing(self) -> None:
        self._stop_looking()
        if self.step_lines.looks < min(THRESHOLDS.line_looks, self._observed_lines.looks):
            self.step_lines = self._observed_lines
        batch_s = self._timer.elapsed_s(self._budget.clock()) / self._warm_up_batches
        self._rotation.time_epoch_starts(batch_s)
        self._rotation.start_others(self.batch, batch_s)
        windows = len(self._rotation.live) * THRESHOLDS.windows_per_source
        self._window_s = max(THRESHOLDS.window_s, self._budget.left_s() / windows)
        self._phase = _Phase.TIMING
        self._next_window()

    def _next_window(self) -> None:
        self._rotation.advance()
        self._timer.skip_step()
        if self._rotation.current.name == AS_IS:
            self._activity.start(self._rotation.current.workers())
            self._memory.begin_window(users_frames(sys._getframe()))
        self._timer.restart()

    def _keep_window(self, now: float) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the steps of this window are not over before the device is
            now = self._budget.clock()
        if self._rotation.current.name == AS_IS:
            self._activity.stop()
            self._memory.end_window(self._timer.batches, users_frames(sys._getframe()))
        self._rotation.add_window(self._timer.window(now))

    def _draw(self) -> Any:
        """Return a batch of the current source, or of the next one that works."""
        while True:
            try:
                batch = self._rotation.current.next_batch()
            except Exception as error:
                if self._rotation.current.name == AS_IS:
                    raise
                self._rotation.current.fail(error)
                self._next_window()
                continue
            if self._phase is _Phase.WARM_UP:
                self.comparison.add(batch)
                self.labels.add(batch)
            if self.batch is None:
                self.batch = copy_containers(batch)  # the step may take apart the one that it gets
            return batch


@contextmanager
def _keep_generators(loader: DataLoader[Any]) -> Iterator[None]:
    """Restore the generators that a loader was given, at the end: trials have its sampler, too."""
    found = [getattr(one, "generator", None) for one in (loader, loader.sampler, loader.batch_sampler)]
    states = [(one, one.get_state()) for one in found if isinstance(one, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
