"""The parts of the trial scheduler, on a clock that tests move."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from penstock.observe.doctor.measurements import Machine
from penstock.observe.doctor.probe_results import Hang
from penstock.observe.doctor.trial import (
    AS_IS,
    FEWER_WORKERS,
    FREE,
    NO_WORKERS,
    ONE_THREAD,
    PENSTOCK,
    PINNED,
    TimingWindow,
    Trial,
)
from penstock.observe.doctor.trials import source_rotation
from penstock.observe.doctor.trials.batch_source import BatchSource, InlineSource, RepeatedBatchSource
from penstock.observe.doctor.trials.loop_watchdog import LoopWatchdog
from penstock.observe.doctor.trials.source_rotation import SourceRotation
from penstock.observe.doctor.trials.time_budget import TimeBudget, TrialsDoneError
from penstock.observe.doctor.trials.trial_plan import plan_sources
from penstock.observe.doctor.trials.trial_scheduler import TrialScheduler
from penstock.observe.doctor.trials.window_timer import WindowTimer


class Clock:
    """Seconds that tests let pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> float:
        self.now += seconds
        return self.now


def test_a_window_divides_a_loops_time_into_waiting_and_steps() -> None:
    clock = Clock()
    timer = WindowTimer(clock)
    for _ in range(3):
        requested_at = clock.now
        timer.on_return(requested_at, clock.wait(0.25))
        timer.on_request(clock.wait(0.75))
    window = timer.window(clock.now)
    assert (window.batches, window.wall_s, window.wait_s, window.step_s) == (3, 3.0, 0.75, 2.25)


def test_the_starts_of_epochs_are_a_part_of_a_windows_wait() -> None:
    clock = Clock()
    timer = WindowTimer(clock)
    for start_s in (0.0, 0.5):
        requested_at = clock.now
        timer.on_return(requested_at, clock.wait(0.25 + start_s), start_s)
        timer.on_request(clock.wait(0.25))
    window = timer.window(clock.now)
    assert (window.wait_s, window.start_s) == (1.0, 0.5)
    assert Trial(name=AS_IS, windows=(window,)).batch_within_epoch_s == 0.5
    timer.restart()
    assert timer.window(clock.now).start_s == 0.0


def test_only_the_first_batch_of_a_later_epoch_has_a_start() -> None:
    source = InlineSource(AS_IS, lambda: DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4))
    starts = []
    for _ in range(4):
        source.next_batch()
        starts.append(source.start_s > 0.0)
    assert starts == [False, False, True, False]


def test_a_step_that_began_in_another_window_does_not_count() -> None:
    clock = Clock()
    timer = WindowTimer(clock)
    timer.on_return(clock.now, clock.now)
    timer.skip_step()
    timer.on_request(clock.wait(1.0))
    assert timer.batches == 0


def test_a_loop_is_ended_when_its_time_is_over() -> None:
    clock = Clock()
    watchdog = LoopWatchdog(TimeBudget(10.0, clock))
    watchdog.note_batch(0.1)
    clock.wait(10.0)
    watchdog.check(list)
    clock.wait(10.0)
    with pytest.raises(TrialsDoneError):
        watchdog.check(list)


def test_a_loop_gets_more_time_until_its_first_batch() -> None:
    clock = Clock()
    watchdog = LoopWatchdog(TimeBudget(10.0, clock))
    clock.wait(20.0)
    watchdog.check(list)


def test_what_the_first_batch_takes_is_taken_off_the_trials_time_but_not_all_of_it() -> None:
    clock = Clock()
    budget = TimeBudget(10.0, clock)
    budget.on_first_batch(clock.wait(3.0), 0.6)
    assert (budget.spent_s(), budget.left_s()) == (0.0, 7.0)
    budget = TimeBudget(10.0, clock)
    budget.on_first_batch(clock.wait(30.0), 0.6)
    assert budget.left_s() == 6.0


def test_sources_for_which_there_is_no_time_are_not_started() -> None:
    clock = Clock()
    loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=4)
    sources: list[Any] = [InlineSource(AS_IS, lambda: loader), RepeatedBatchSource(FREE)]
    sources += [InlineSource(name, lambda: loader) for name in ("first", "second")]
    budget = TimeBudget(10.0, clock)
    rotation = SourceRotation(sources, budget, LoopWatchdog(budget))
    rotation.start_others(torch.zeros(4), batch_s=1.0)
    assert [source.name for source in rotation.live] == [AS_IS, FREE, "first"]


@pytest.mark.parametrize(("batch_s", "is_tried"), [(0.5, True), (1.0, False)])
def test_a_trial_without_workers_may_take_as_long_for_a_batch_as_all_of_them_together(
    batch_s: float, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_rotation, "usable_cores", lambda: 4)
    samples = TensorDataset(torch.arange(64.0))
    own = BatchSource(AS_IS, list)  # type: ignore[arg-type]  # is never opened
    own.loader = DataLoader(samples, batch_size=4, num_workers=2)
    sources = [own, RepeatedBatchSource(FREE), InlineSource(NO_WORKERS, lambda: DataLoader(samples, batch_size=4))]
    budget = TimeBudget(10.0, Clock())
    rotation = SourceRotation(sources, budget, LoopWatchdog(budget))
    rotation.start_others(torch.zeros(4), batch_s)
    assert (NO_WORKERS in [source.name for source in rotation.live]) is is_tried


def test_a_loop_is_ended_when_its_workers_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    watchdog = LoopWatchdog(TimeBudget(10.0, clock))
    hang = Hang(workers=2, waited_s=4.0)
    monkeypatch.setattr(watchdog._detector, "check", lambda pids, now, waited_s: hang if waited_s > 3 else None)
    watchdog.begin_wait(clock.now)
    clock.wait(2.0)
    watchdog.check(lambda: [1, 2])
    clock.wait(2.0)
    with pytest.raises(TrialsDoneError):
        watchdog.check(lambda: [1, 2])
    assert watchdog.hang is hang


def test_a_wait_far_longer_than_any_before_may_be_for_a_paused_source() -> None:
    clock = Clock()
    watchdog = LoopWatchdog(TimeBudget(10.0, clock))
    watchdog.note_batch(0.4)
    watchdog.begin_wait(clock.now)
    clock.wait(1.0)
    assert not watchdog.is_blocked()
    clock.wait(1.0)
    assert watchdog.is_blocked()
    watchdog.end_wait()
    assert not watchdog.is_blocked()


def _run(seconds: float, on_batch: Any = lambda scheduler, number: None) -> TrialScheduler:
    clock = Clock()
    loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=4)

    def plan(own: DataLoader[Any], has_step: bool) -> list[Any]:
        return [InlineSource(AS_IS, lambda: own), RepeatedBatchSource(FREE)]

    scheduler = TrialScheduler(plan, seconds, clock)
    scheduler.begin(loader)
    try:
        for number, _ in enumerate(scheduler):
            on_batch(scheduler, number)
            clock.wait(0.02)
    except TrialsDoneError:
        scheduler.close()
    return scheduler


def test_windows_of_the_loop_as_is_and_with_free_loading_alternate_until_the_time_is_over() -> None:
    trials = _run(10.0).trials()
    assert [trial.name for trial in trials] == [AS_IS, FREE]
    counts = [len(trial.windows) for trial in trials]
    assert min(counts) >= 3
    assert max(counts) - min(counts) <= 1
    for trial in trials:
        assert trial.batch_s == pytest.approx(0.02)


def test_what_other_sources_take_to_start_is_no_time_of_a_loop_that_ends_meanwhile() -> None:
    clock = Clock()
    loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=4)

    class Endless(InlineSource):
        def warm_up(self) -> None:
            clock.wait(100.0)
            raise TrialsDoneError

    def plan(own: DataLoader[Any], has_step: bool) -> list[Any]:
        return [InlineSource(AS_IS, lambda: own), Endless("other", lambda: own)]

    scheduler = TrialScheduler(plan, 10.0, clock)
    scheduler.begin(loader)
    with contextlib.suppress(TrialsDoneError):
        for _ in scheduler:
            clock.wait(0.02)
    (window,) = scheduler.trials()[0].windows
    scheduler.close()
    assert clock() > 100.0
    assert window.wall_s / window.batches == pytest.approx(0.02)


def test_a_window_that_is_interrupted_early_is_discarded() -> None:
    def interrupt(scheduler: TrialScheduler, number: int) -> None:
        scheduler.tick()
        if number % 4 == 0:
            scheduler.interrupt()

    calm, interrupted = (
        sum(window.batches for trial in _run(10.0, on_batch).trials() for window in trial.windows)
        for on_batch in (lambda scheduler, number: None, interrupt)
    )
    assert calm > 100
    assert interrupted <= 4


def test_copying_a_batch_that_is_repeated_is_no_time_of_the_loop() -> None:
    budget = TimeBudget(10.0, Clock())
    rotation = SourceRotation([RepeatedBatchSource(FREE)], budget, LoopWatchdog(budget))
    rotation.add_window(TimingWindow(batches=2, wall_s=3.0, wait_s=2.0, step_s=1.0))
    (free,) = rotation.trials()
    assert (free.batch_s, free.step_s, free.wait_fraction) == (0.5, 0.5, 0.0)


def test_more_workers_than_cores_are_compared_with_fewer_and_with_none() -> None:
    loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=4, num_workers=12)
    names = [source.name for source in plan_sources(loader, Machine(cores=2), has_step=True)]
    assert {FEWER_WORKERS, NO_WORKERS} < set(names)


@pytest.mark.parametrize("workers", [0, 2])
def test_with_an_accelerator_pinned_batches_are_tried_first(workers: int) -> None:
    loader = DataLoader(
        TensorDataset(torch.arange(64.0)), batch_size=4, num_workers=workers, persistent_workers=workers > 0
    )
    sources = plan_sources(loader, Machine(cores=4, accelerator="cuda"), has_step=True)
    assert [source.name for source in sources][:3] == [AS_IS, FREE, PINNED]
    assert next(one.line for one in sources if one.name == PENSTOCK).endswith("pin_memory=True)")
    assert PINNED not in [source.name for source in plan_sources(loader, Machine(cores=4), has_step=True)]
    pinned = DataLoader(loader.dataset, batch_size=4, num_workers=workers, pin_memory=True)
    there = plan_sources(pinned, Machine(cores=4, accelerator="cuda"), has_step=True)
    assert PINNED not in [source.name for source in there]


def test_pinned_batches_are_tried_on_where_free_loading_gains_nothing() -> None:
    sources = [RepeatedBatchSource(name) for name in (AS_IS, FREE, PINNED, PENSTOCK)]
    budget = TimeBudget(60.0)
    rotation = SourceRotation(sources, budget, LoopWatchdog(budget))
    for _ in range(6 * len(sources)):
        rotation.add_window(TimingWindow(batches=10, wall_s=1.0, wait_s=0.0, step_s=1.0))
        rotation.advance()
    assert [source.name for source in rotation.live] == [AS_IS, FREE, PINNED]


def test_a_scheduler_that_was_reset_has_no_loop() -> None:
    scheduler = _run(2.0)
    assert scheduler.loader is not None
    scheduler.reset()
    assert scheduler.loader is None
    assert scheduler.trials() == ()


def test_one_thread_is_tried_before_the_rounds_and_in_its_own_turn_only() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        sources = [RepeatedBatchSource(name) for name in (AS_IS, ONE_THREAD, FREE)]
        budget = TimeBudget(60.0)
        rotation = SourceRotation(sources, budget, LoopWatchdog(budget))
        threads = [torch.get_num_threads()]
        for _ in range(4):
            rotation.advance()
            threads.append(torch.get_num_threads())
        rotation.advance()  # one thread again
        rotation.close()
        assert threads == [1, 2, 1, 2, 2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
