"""The parts of the trial scheduler, on a clock that tests move."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from penstock.observe.doctor.measurements import Machine
from penstock.observe.doctor.trial import (
    AS_IS,
    FEWER_WORKERS,
    FREE,
    MORE_WORKERS,
    TimingWindow,
    Trial,
)
from penstock.observe.doctor.trials import source_rotation
from penstock.observe.doctor.trials.batch_source import BatchSource, InlineSource, RepeatedBatchSource
from penstock.observe.doctor.trials.loop_session import LoopSession
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
    rotation = SourceRotation(sources, budget)
    rotation.start_others(torch.zeros(4), batch_s=1.0)
    assert [source.name for source in rotation.live] == [AS_IS, FREE]
    budget = TimeBudget(30.0, clock)
    again = SourceRotation(
        [*sources[:2], *(InlineSource(name, lambda: loader) for name in ("first", "second"))], budget
    )
    again.start_others(torch.zeros(4), batch_s=1.0)
    assert [source.name for source in again.live] == [AS_IS, FREE, "first"]


@pytest.mark.parametrize(("batch_s", "is_tried"), [(0.2, True), (0.5, False)])
def test_a_trial_without_workers_may_take_as_long_for_a_batch_as_all_of_them_together(
    batch_s: float, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_rotation, "usable_cores", lambda: 4)
    samples = TensorDataset(torch.arange(64.0))
    own = BatchSource(AS_IS, list)  # type: ignore[arg-type]  # is never opened
    own.loader = DataLoader(samples, batch_size=4, num_workers=2)
    sources = [own, RepeatedBatchSource(FREE), InlineSource(FEWER_WORKERS, lambda: DataLoader(samples, batch_size=4))]
    budget = TimeBudget(10.0, Clock())
    rotation = SourceRotation(sources, budget)
    rotation.start_others(torch.zeros(4), batch_s)
    assert (FEWER_WORKERS in [source.name for source in rotation.live]) is is_tried


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


def _trials(scheduler: TrialScheduler) -> tuple[Trial, ...]:
    assert scheduler.session is not None
    return scheduler.session.trials()


def test_windows_of_the_loop_as_is_and_with_free_loading_alternate_until_the_time_is_over() -> None:
    trials = _trials(_run(10.0))
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
    (window,) = _trials(scheduler)[0].windows
    scheduler.close()
    assert clock() > 100.0
    assert window.wall_s / window.batches == pytest.approx(0.02)


def test_a_window_that_is_interrupted_early_is_discarded() -> None:
    def interrupt(scheduler: TrialScheduler, number: int) -> None:
        scheduler.tick()
        if number % 4 == 0:
            assert scheduler.session is not None
            scheduler.session.interrupt()

    calm, interrupted = (
        sum(window.batches for trial in _trials(_run(10.0, on_batch)) for window in trial.windows)
        for on_batch in (lambda scheduler, number: None, interrupt)
    )
    assert calm > 100
    assert interrupted <= 4


def test_copying_a_batch_that_is_repeated_is_no_time_of_the_loop() -> None:
    budget = TimeBudget(10.0, Clock())
    rotation = SourceRotation([RepeatedBatchSource(FREE)], budget)
    rotation.add_window(TimingWindow(batches=2, wall_s=3.0, wait_s=2.0, step_s=1.0))
    (free,) = rotation.trials()
    assert (free.batch_s, free.step_s, free.wait_fraction) == (0.5, 0.5, 0.0)


def test_a_scheduler_that_was_reset_has_no_loop() -> None:
    scheduler = _run(2.0)
    assert scheduler.loader is not None
    scheduler.reset()
    assert scheduler.loader is None
    assert scheduler.session is None


def test_a_loop_is_ended_when_its_time_is_over_and_gets_more_until_its_first_batch() -> None:
    def end_late(scheduler: TrialScheduler, number: int) -> None:
        clock = scheduler.session._budget.clock  # type: ignore[union-attr]
        if number == 2:
            clock.wait(30.0)  # type: ignore[attr-defined]
            with pytest.raises(TrialsDoneError):
                scheduler.tick()
            raise TrialsDoneError

    _run(10.0, end_late)
    clock = Clock()
    session = LoopSession(DataLoader(range(4)), [RepeatedBatchSource(AS_IS)], TimeBudget(10.0, clock), has_step=True)  # type: ignore[arg-type]
    clock.wait(14.0)
    session.tick()
    clock.wait(7.0)
    with pytest.raises(TrialsDoneError):
        session.tick()


class Ahead(InlineSource):
    """Stands for workers: after a pause there are batches that were made ahead, which take no time; others take 1 s."""

    def __init__(self, clock: Clock, loader: Any) -> None:
        super().__init__(AS_IS, lambda: loader)
        self.clock, self.ahead = clock, 4

    @property
    def prefetch_limit(self) -> int:
        return 4

    def pause(self) -> None:
        self.ahead = 4

    def next_batch(self) -> Any:
        self.clock.wait(0.0 if self.ahead else 1.0)
        self.ahead = max(0, self.ahead - 1)
        return super().next_batch()


def test_batches_that_were_made_before_a_window_do_not_count_in_it() -> None:
    clock = Clock()
    loader = DataLoader(TensorDataset(torch.arange(4096.0)), batch_size=4)

    def plan(own: DataLoader[Any], has_step: bool) -> list[Any]:
        return [Ahead(clock, own), RepeatedBatchSource(FREE)]

    scheduler = TrialScheduler(plan, 200.0, clock)
    scheduler.begin(loader)
    with contextlib.suppress(TrialsDoneError):
        for _ in scheduler:
            clock.wait(0.1)
    as_is, free = _trials(scheduler)
    scheduler.close()
    assert len(as_is.windows) > 1
    for window in as_is.windows:
        assert window.wall_s / window.batches == pytest.approx(1.1)
    assert free.batch_s == pytest.approx(0.1)


def test_what_is_tried_depends_on_the_cores_and_on_a_busy_machine_only_free_loading_is() -> None:
    def names(workers: int, **machine: Any) -> list[str]:
        loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=4, num_workers=workers)
        sources = plan_sources(loader, Machine(**machine), has_step=True)
        return [f"{source.name} ({source.line})" if source.line else source.name for source in sources]

    penstock_0, fewer = "penstock's loader (penstock.DataLoader(..., num_workers=0))", f"{FEWER_WORKERS} (num_workers="
    assert names(0, cores=2) == [AS_IS, FREE, f"{MORE_WORKERS} (num_workers=2)", penstock_0]
    assert f"{fewer}0)" in names(2, cores=2)
    assert f"{fewer}3)" in names(12, cores=2)
    assert names(2, cores=2, others_cores=1.5) == [AS_IS, FREE]
    assert names(2, cores=2, load=8.0, others_cores=0.0) == [AS_IS, FREE]


def test_on_a_crowded_machine_torch_has_one_thread_until_the_trials_are_over() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=4)
        scheduler = TrialScheduler(lambda own, _: [InlineSource(AS_IS, lambda: own)], 9.0, Clock(), one_thread=True)
        scheduler.begin(loader)
        next(scheduler)
        assert torch.get_num_threads() == 1
        scheduler.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
