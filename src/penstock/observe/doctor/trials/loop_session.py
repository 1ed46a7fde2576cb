"""The schedule of one loop's trials: warm up, then timing windows that alternate between sources.

```
 WARM_UP ──enough batches──▶ start all sources ──▶ TIMING ──window over──▶ next source ──time over──▶ TrialsDoneError
    the loop's own loader:                           │  ▲
    calls, leaks and lines of steps      interrupted ▼  │ next request
                                          window kept or discarded
```

A window counts only batches that were made in it: those that its source's workers may have made ahead come first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock.core.random_states import keep_states
from penstock.observe.doctor import thresholds
from penstock.observe.doctor.contents.seen_labels import LabelRecorder
from penstock.observe.doctor.probes.batch_values import copy_containers
from penstock.observe.doctor.probes.line_sampler import LineSampler
from penstock.observe.doctor.probes.steps.leak_watch import LEAST_STEPS, MOST_STEPS, LeakWatch
from penstock.observe.doctor.probes.steps.step_calls import StepCallRecorder
from penstock.observe.doctor.probes.worker_activity import WorkerActivityProbe
from penstock.observe.doctor.step_results import KeptTensors
from penstock.observe.doctor.trial import AS_IS, Trial
from penstock.observe.doctor.trials.batch_source import BatchSource
from penstock.observe.doctor.trials.source_rotation import SourceRotation
from penstock.observe.doctor.trials.stream_comparison import StreamComparison
from penstock.observe.doctor.trials.time_budget import TimeBudget, TrialsDoneError
from penstock.observe.doctor.trials.window_timer import WindowTimer

_WARM_UP_BATCHES = 3
"""Batches: the first ones compile, allocate and fill caches."""
_OBSERVED_STEPS = 3
"""Steps: a call that all of these make is made in every step."""
_LINE_LOOKS = 100
"""Looks: a line that takes half of a step is seen in 40 to 60 of so many; looks are 3 ms apart."""
_WINDOWS_PER_SOURCE = 5
"""Windows: the time is divided so that each source gets about this many."""
_CUT_WINDOW_BATCHES = 8
"""Batches: a window that a validation interrupts is kept if it has this many."""
_BLOCKED_SOURCE_S = 0.5
"""Seconds: a source that waits longer than this (and 3 times its longest wait) may need a paused one's lock."""
_OVERRUN = 1.1
"""Times the trials' time: what the loop may take before it is ended by a signal."""
_OVERRUN_S = 0.5
"""Seconds: added to it, for short --seconds."""
_FIRST_BATCH = 2.0
"""Times the trials' time: what the loop may take for its first batch."""
_FIRST_BATCH_S = 15.0
"""Seconds: the same for short --seconds: workers import torch, and read."""
_LEFT_AFTER_START = 0.6
"""Of the trials' time: left for the trials however long the loop's first batch took: the probes get less."""

_LEAKS, _LEAST_LEAKS = 0.2, 0.4
"""Of the time, until when leaks are watched for, and until when for the fewest steps that show any."""
_NO_LOOKS = 1 / 8
"""Of the time, in which nothing is looked at while no step has trained: a program may just collect its batches."""
_MOST_WARM_UP = 0.55
"""Of the time, when the warm-up ends whatever was seen."""


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
        has_step: whether the loop does something with its batches.
        one_thread: whether torch computes with one thread meanwhile: where other programs take the processors, its
            threads wait for each other in every operation, and nothing else would be seen of a step.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sources: Sequence[BatchSource],
        budget: TimeBudget,
        *,
        has_step: bool,
        one_thread: bool = False,
    ) -> None:
        self.loader = loader
        self.batch: Any = None
        self.comparison = StreamComparison(loader)
        self.labels = LabelRecorder()
        self.step_calls = StepCallRecorder()
        self.activity = WorkerActivityProbe()
        self.is_complete = False
        """Whether all trials are over, and nothing but their time has ended them."""
        self.may_try = True
        """Whether the loop is known to be the one to examine; until then it gets the batches of its own loader."""
        self.lines = LineSampler()
        """Of the warm-up's steps, which are not timed."""
        self.kept: tuple[KeptTensors, ...] = ()
        """What the program keeps of every step."""
        self._leaks: LeakWatch | None = LeakWatch() if has_step else None
        self._budget = budget
        self._has_step = has_step
        self._threads = torch.get_num_threads()
        self._has_one_thread = one_thread
        self._timer = WindowTimer(budget.clock)
        self._rotation = SourceRotation(sources, budget)
        self._phase = _Phase.WARM_UP
        self._interruption = _Interruption.NONE
        self._warm_up_batches = 0
        self._window_s = 0.0
        self._made_ahead = 0
        """How many more batches of this window may have been made before it."""
        self._has_started = False
        self._waits_since = math.inf
        self._longest_wait_s = 0.0

    def start(self) -> None:
        """Start what has to be started before the loop's first batch, which is the one that it gets without trials."""
        if self._has_one_thread:
            torch.set_num_threads(1)
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
        self._stop_looking()
        if self._interruption is not _Interruption.NONE:
            self._resume()
        if self._timer.returned_at is None:  # a step that does not count is over
            self._timer.restart()
        self._timer.on_request(now)
        self._advance(now)
        requested_at = self._waits_since = self._budget.clock()
        try:
            batch = self._draw()
        finally:
            self._waits_since = math.inf
            now = self._budget.clock()
            if self._rotation.current.startup_s is not None and not self._has_started:
                self._has_started = True
                requested_at = now  # however long its workers took to start
                self._budget.on_first_batch(now, _LEFT_AFTER_START)
                self._timer.restart()
            self._timer.on_return(requested_at, now, self._rotation.current.start_s)
        self._longest_wait_s = max(self._longest_wait_s, now - requested_at)
        if self._phase is _Phase.WARM_UP:
            spent = self._budget.spent_s() / self._budget.seconds
            if self.may_try or spent > _NO_LOOKS:
                self._look(batch, spent)
        elif self._made_ahead:
            self._made_ahead -= 1
            self._timer.skip_step()
        return batch

    def tick(self) -> None:
        """Check the time; called by a signal, between any two instructions of the loop.

        Raises:
            TrialsDoneError: the time is over.
        """
        now = self._budget.clock()
        limit_s = self._budget.seconds * _OVERRUN + _OVERRUN_S
        if not self._has_started:
            limit_s = max(self._budget.seconds * _FIRST_BATCH, _FIRST_BATCH_S)
        if self._budget.spent_s(now) > limit_s:
            raise TrialsDoneError
        # A wait far longer than any before may be for a lock that a paused worker has.
        is_blocked = now - self._waits_since > max(_BLOCKED_SOURCE_S, 3 * self._longest_wait_s)
        if is_blocked and self._rotation.stop_pausing() and self._interruption is _Interruption.NONE:
            self._interruption = _Interruption.WINDOW_DISCARDED

    def interrupt(self) -> None:
        """End the window here, because the program does something else, such as a validation."""
        if self._interruption is not _Interruption.NONE:
            return
        returned_at = self._timer.returned_at
        is_long_enough = self._timer.batches >= _CUT_WINDOW_BATCHES
        if self._phase is _Phase.TIMING and returned_at is not None and is_long_enough:
            # Without the last batch: its step may have ended long ago.
            self._keep_window(returned_at)
            self._interruption = _Interruption.WINDOW_KEPT
        else:
            self._interruption = _Interruption.WINDOW_DISCARDED

    def trials(self) -> tuple[Trial, ...]:
        """Return what every source has shown."""
        if self._timer.batches and not self._rotation.has_windows and not self._made_ahead:  # the time was over before
            self._keep_window(self._timer.requested_at)
        return self._rotation.trials()

    def rest(self) -> None:
        """Stop the workers of the source that has fed the loop last."""
        self._rotation.current.pause()

    def close(self) -> None:
        """Close all sources."""
        self._stop_looking()
        self._rotation.close()
        if self._has_one_thread:
            self._has_one_thread = False
            torch.set_num_threads(self._threads)

    def _look(self, batch: Any, spent: float) -> None:
        """Choose what is looked at in a step of the warm-up: its calls, what it leaves behind, or its lines."""
        if not self._has_step:
            self.lines.start()
            return
        first = 1 if spent > _NO_LOOKS else _WARM_UP_BATCHES
        leaks = self._leaks
        if self._warm_up_batches >= first and self.step_calls.steps < _OBSERVED_STEPS:
            self.step_calls.enter(batch)
        elif self.step_calls.steps >= _OBSERVED_STEPS and leaks is not None:
            if (leaks.steps < MOST_STEPS and spent < _LEAKS) or (leaks.steps < LEAST_STEPS and spent < _LEAST_LEAKS):
                leaks.enter()
            else:
                self.kept, self._leaks = leaks.result(), None
        if self._leaks is None:
            self.lines.turn = self._warm_up_batches
            self.lines.start()

    def _stop_looking(self) -> None:
        self.step_calls.leave()
        self.lines.stop()
        if self._leaks is not None:
            self._leaks.leave()

    def _resume(self) -> None:
        """Start a window at the first request after an interruption."""
        was_kept = self._interruption is _Interruption.WINDOW_KEPT
        self._interruption = _Interruption.NONE
        self._timer.skip_step()
        if was_kept:
            self._next_window()
        else:
            self._made_ahead = self._rotation.current.prefetch_limit  # made while the program did something else

    def _advance(self, now: float) -> None:
        """Start the next window if this one is over; end the loop after the last one."""
        if self._phase is _Phase.WARM_UP:
            if self._is_warm(now):
                self._begin_timing()
        elif self._timer.batches >= thresholds.WINDOW_BATCHES and self._timer.elapsed_s(now) >= self._window_s:
            self._keep_window(now)
            if self._budget.spent_s(now) > self._budget.seconds and not self._rotation.lacks_free_loading:
                self.is_complete = True
                raise TrialsDoneError
            self._next_window()

    def _is_warm(self, now: float) -> bool:
        """Count a batch of the warm-up; return whether it was the last one."""
        if self._timer.returned_at is None:
            return False
        self._warm_up_batches += 1
        if self._warm_up_batches == self._rotation.current.prefetch_limit:
            self._timer.restart()
        spent = self._budget.spent_s(now) / self._budget.seconds
        has_observed = not self._has_step or self.step_calls.steps >= _OBSERVED_STEPS
        has_enough = self._warm_up_batches >= _WARM_UP_BATCHES and not self.comparison.lacks_batches
        has_looked = self._leaks is None and self.lines.looks >= _LINE_LOOKS
        return (has_observed and has_enough and has_looked and self.may_try) or spent > _MOST_WARM_UP

    def _begin_timing(self) -> None:
        self._stop_looking()
        if self._leaks is not None:
            self.kept, self._leaks = self._leaks.result(), None
        batch_s = self._timer.elapsed_s(self._budget.clock()) / max(1, self._timer.batches)
        self._rotation.start_others(self.batch, batch_s)
        windows = len(self._rotation.live) * _WINDOWS_PER_SOURCE
        self._window_s = max(thresholds.WINDOW_S, self._budget.left_s() / windows)
        self._phase = _Phase.TIMING
        self._next_window()

    def _next_window(self) -> None:
        self._rotation.advance()
        self._made_ahead = self._rotation.current.prefetch_limit
        self._timer.skip_step()
        if self._rotation.current.name == AS_IS:
            self.activity.start(self._rotation.current.workers())
        self._timer.restart()

    def _keep_window(self, now: float) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the steps of this window are not over before the device is
            now = self._budget.clock()
        if self._rotation.current.name == AS_IS:
            self.activity.stop()
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
