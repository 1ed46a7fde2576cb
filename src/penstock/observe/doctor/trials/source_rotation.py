"""Which source feeds the loop: opens the sources, lets them alternate, and drops those that cannot matter."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from penstock.core.host import usable_cores
from penstock.observe.doctor import thresholds
from penstock.observe.doctor.trial import AS_IS, FREE, TimingWindow, Trial, gain_between
from penstock.observe.doctor.trials.batch_source import BatchSource, RepeatedBatchSource
from penstock.observe.doctor.trials.time_budget import TimeBudget

_HOPELESS_GAIN = 1.03
"""Times as fast with loading free: nothing beats free loading: below this, no other trial continues."""
_START_DEADLINE_FRACTION = 0.5
"""Of the trials' time: sources whose workers start later leave no time to compare them."""

_ROUNDS = 2
"""Of a source that is not worth starting for fewer: two rounds that agree are the least that shows a gain."""


class SourceRotation:
    """Sources that feed one loop in rounds, a window each. Sources whose turn it is not are paused.

    Args:
        sources: the first is the loop's own loader.
        budget: the trials' time.
    """

    def __init__(self, sources: Sequence[BatchSource], budget: TimeBudget) -> None:
        self._sources = list(sources)
        self._budget = budget
        self._round: list[BatchSource] = []
        self._windows: dict[str, list[TimingWindow]] = {}
        self._has_paused = False
        self._never_pauses = False
        self.current = self._sources[0]

    @property
    def live(self) -> list[BatchSource]:
        """The sources that are still tried; the first is the loop's own loader."""
        return [source for source in self._sources if source.is_live]

    def start_processes_first(self) -> None:
        """Start the other sources' processes if the loop's own loader calls the dataset in this process.

        Forked workers must not inherit files that the dataset opens when it is first called.
        """
        if self.current.runs_in_this_process:
            self._open([source for source in self.live[1:] if source.starts_processes])

    def start_others(self, batch: Any, batch_s: float) -> None:
        """Start the other sources, while the loop's own loader is paused.

        Args:
            batch: the one to repeat.
            batch_s: what the loop took for each batch so far.
        """
        self.current.pause()  # or it would prefetch meanwhile
        self._has_paused = True
        self._retire_unaffordable(batch_s)
        self._open([source for source in self.live[1:] if source.starts_processes])
        self._open([source for source in self.live[1:] if not source.starts_processes])
        for source in self.live:
            if isinstance(source, RepeatedBatchSource):
                source.batch = batch

    def add_window(self, window: TimingWindow) -> None:
        """Keep a window of the current source; copying a batch that is repeated is no part of the loop."""
        if isinstance(self.current, RepeatedBatchSource):
            window = replace(window, wall_s=window.wall_s - window.wait_s, wait_s=0.0)
        self._windows.setdefault(self.current.name, []).append(window)

    @property
    def has_windows(self) -> bool:
        """Whether any window was kept."""
        return bool(self._windows)

    @property
    def lacks_free_loading(self) -> bool:
        """Whether the trial with free loading, the most important one, has not been timed yet."""
        return any(source.name == FREE and not self._windows.get(FREE) for source in self.live)

    def advance(self) -> None:
        """Make the next source of the round the current one; begin the next round after the last."""
        if not self._never_pauses:
            self.current.pause()
        self._round = [source for source in self._round if source.is_live]
        if not self._round:
            self._drop_hopeless()
            self._round = self.live
        self.current = self._round.pop(0)
        self.current.resume()

    def stop_pausing(self) -> bool:
        """Let all sources run from now on; return False if none has ever been paused, or they run already.

        A dataset may have a lock that all its workers share, also with those of other sources: one that was stopped
        while it held the lock blocks them all.
        """
        if self._never_pauses or not self._has_paused:
            return False
        self._never_pauses = True
        for source in self._sources:
            source.resume()
        return True

    def trials(self) -> tuple[Trial, ...]:
        """Return what every source has shown."""
        return tuple(
            Trial(
                name=source.name,
                line=source.line,
                windows=tuple(self._windows.get(source.name, ())),
                startup_s=source.restart_s or source.startup_s,
                failure=source.failure,
            )
            for source in self._sources
        )

    def close(self) -> None:
        """Close all sources."""
        for source in self._sources:
            source.close()

    def _drop_hopeless(self) -> None:
        """Give the time that is left to what can still matter: a change that loses twice is not tried a third time.

        Nothing gains more than free loading would: where that gains nothing, nothing else is tried any longer.
        """
        before = self._timed(AS_IS)
        nothing_to_gain = False
        for source in self.live[1:]:
            gain = gain_between(before, self._timed(source.name))
            if gain is None or gain.rounds < _ROUNDS:
                continue
            if source.name == FREE:
                nothing_to_gain = gain.median < _HOPELESS_GAIN and gain.rounds > _ROUNDS
            elif gain.high < 1.0 or nothing_to_gain:
                source.retire()

    def _timed(self, name: str) -> Trial:
        return Trial(name=name, windows=tuple(self._windows.get(name, ())))

    def _open(self, sources: Sequence[BatchSource]) -> None:
        """Start, warm up and pause one source after another, and side by side where processes import torch first.

        Workers of all sources at once would make batches that nobody asks for, on the cores that each of them needs.
        """
        new = [source for source in sources if not source.is_open]
        if not _forks(self._sources[0].loader):
            for source in new:
                _attempt(source, source.open)
        for source in new:
            is_late = self._budget.spent_s() > self._budget.seconds * _START_DEADLINE_FRACTION
            if source.starts_processes and is_late:
                source.retire()
            _attempt(source, source.warm_up)
            if not self._never_pauses:
                source.pause()
                self._has_paused = True

    def _retire_unaffordable(self, batch_s: float) -> None:
        """Keep the first sources that can start, and get their windows, in the time that is left."""
        own, *others = self.live
        left_s = self._budget.left_s() - self._windows_s(own, batch_s)
        for source in others:
            starts = source.starts_processes and not source.is_open
            start_s = 0.0 if own.runs_in_this_process or not starts else own.startup_s or 0.0
            cost_s = self._windows_s(source, batch_s) * _times_as_long(source, own) + start_s
            if isinstance(source, RepeatedBatchSource) or cost_s <= left_s:
                left_s -= cost_s
            else:
                source.retire()

    def _windows_s(self, source: BatchSource, batch_s: float) -> float:
        """Return what the rounds of a source take at least, with the batches that may have been made ahead of each."""
        ahead = self._sources[0].prefetch_limit if source.starts_processes else 0
        return _ROUNDS * max(thresholds.WINDOW_S, (ahead + thresholds.WINDOW_BATCHES) * batch_s)


def _times_as_long(source: BatchSource, own: BatchSource) -> float:
    """Return how many times as long a source may take for a batch: without workers, as many as shared its making."""
    if own.loader is None or own.runs_in_this_process or not source.runs_in_this_process:
        return 1.0
    return max(1.0, min(float(own.loader.num_workers), usable_cores()))


def _forks(loader: DataLoader[Any] | None) -> bool:
    context = (loader.multiprocessing_context if loader is not None else None) or multiprocessing
    return bool(context.get_start_method() == "fork")


def _attempt(source: BatchSource, act: Callable[[], None]) -> None:
    if source.is_live:
        try:
            act()
        except Exception as error:
            source.fail(error)
