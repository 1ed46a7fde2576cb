"""The rule behind num_workers="auto": from what batches show to how many workers there should be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.loader.scheduling.auto_workers import AutoWorkers, BatchTiming

MS = 1_000_000


def timing(step_ms: float, work_ms: float, *, wait_ms: float = 0.0, handling_ms: float = 0.2, busy: float = 1.0):
    return BatchTiming(
        step_ns=int(step_ms * MS),
        handling_ns=int(handling_ms * MS),
        wait_ns=int(wait_ms * MS),
        work_ns=int(work_ms * MS),
        busy_ns=int(busy * work_ms * MS),
    )


class Loop:
    """A loop whose step takes `step_ms`, and whose workers take `work_ms(workers)` for a batch; simulated."""

    def __init__(self, auto: AutoWorkers, step_ms: float, work_ms: Callable[[int], float], busy: float = 1.0):
        self.auto, self.step_ms, self.work_ms = auto, step_ms, work_ms
        self.busy = busy
        """The fraction of the work that is not waiting."""

    def next_timing(self) -> BatchTiming:
        """Return what the next batch shows."""
        work_ms = self.work_ms(self.auto.workers)
        wait_ms = max(0.0, work_ms / self.auto.workers - self.step_ms - 0.2)
        return timing(self.step_ms, work_ms, wait_ms=wait_ms, busy=self.busy)

    def run(self, batches: int) -> list[int]:
        """Run so many batches of one epoch; return how many workers there were at each."""
        return [self.auto.observe(self.next_timing()) for _ in range(batches)]

    def run_epochs(self, epochs: int, batches: int = 1000) -> list[int]:
        """Run epochs in which the number must not change; return how many workers each had."""
        had = []
        for _ in range(epochs):
            had.append(self.auto.choose(is_fixed=True))
            for _ in range(batches):
                self.auto.note(self.next_timing())
        return had


@pytest.mark.parametrize(("work_ms", "wanted"), [(20, 2), (38, 4), (58, 6), (500, 8)])
def test_there_are_as_many_as_the_step_needs_within_a_second(work_ms: float, wanted: int) -> None:
    workers = Loop(AutoWorkers(workers=2, most=8), 10, lambda workers: work_ms).run(300)
    assert workers[50] == wanted
    assert set(workers[50:]) == {wanted}


def test_a_cost_that_grows_or_falls_is_followed_within_two_seconds_and_then_it_settles() -> None:
    loop = Loop(AutoWorkers(workers=2, most=8), 10, lambda workers: 15)
    assert set(loop.run(200)) == {2}
    for work_ms, wanted in ((45, 5), (9, 2)):
        loop.work_ms = lambda workers, work_ms=work_ms: work_ms  # type: ignore[misc]
        assert loop.run(200)[-1] == wanted
        assert set(loop.run(500)) == {wanted}


def test_one_slow_batch_in_many_changes_nothing() -> None:
    loop = Loop(AutoWorkers(workers=2, most=8), 10, lambda workers: 18)
    loop.run(30)
    loop.work_ms = lambda workers: 60
    loop.run(1)
    loop.work_ms = lambda workers: 18
    assert set(loop.run(300)) == {2}


@pytest.mark.parametrize(("busy", "wanted"), [(1.0, 2), (0.6, 3), (0.4, 8), (0.01, 32)])
def test_workers_that_wait_may_be_as_many_as_their_computing_fills_the_cores(busy: float, wanted: int) -> None:
    auto = AutoWorkers(workers=1, most=2, most_waiting=32)
    assert Loop(auto, 1, lambda workers: 1000, busy).run(200)[-1] == wanted


def test_workers_that_have_waited_and_now_compute_are_as_many_as_the_cores() -> None:
    loop = Loop(AutoWorkers(workers=1, most=2, most_waiting=32), 1, lambda workers: 1000, busy=0.01)
    assert loop.run(100)[-1] == 32
    loop.busy = 1.0
    assert loop.run(100)[-1] == 2


def test_workers_beyond_the_cores_that_make_more_stay() -> None:
    auto = AutoWorkers(workers=1, most=2, most_waiting=32)
    had = Loop(auto, 1, lambda workers: 100, busy=0.02).run_epochs(10)
    assert set(had[1:]) == {32}


def test_what_the_system_refuses_is_not_asked_again() -> None:
    auto = AutoWorkers(workers=2, most=8)
    auto.limit(2, "the system starts no more")
    assert set(Loop(auto, 1, lambda workers: 100).run(300)) == {2}
    assert auto.reason == "the system starts no more"


def test_there_are_never_fewer_than_the_least() -> None:
    assert set(Loop(AutoWorkers(workers=4, most=8, least=4), 100, lambda workers: 1).run(100)) == {4}


def test_a_fixed_number_is_chosen_again_from_the_timing_of_an_epoch() -> None:
    auto = AutoWorkers(workers=3, most=8)
    assert auto.choose(is_fixed=True) == 3
    for _ in range(20):
        auto.note(timing(10, 48, wait_ms=6, handling_ms=0))
    assert auto.choose(is_fixed=True) == 5
    for workers in (5, 2):  # the epoch after a cheap one may cost as much as the one before
        for _ in range(20):
            auto.note(timing(10, 12, handling_ms=0))
        assert auto.choose(is_fixed=True) == workers
    assert "fills 1.2 workers" in auto.reason


def test_a_fixed_number_follows_a_curriculum_whose_epochs_cost_ever_more() -> None:
    loop = Loop(AutoWorkers(workers=2, most=2, most_waiting=32), 2, lambda workers: 5, busy=0.03)
    cost_ms = 5.0
    for _ in range(12):
        cost_ms *= 1.3
        loop.work_ms = lambda workers, cost_ms=cost_ms: cost_ms  # type: ignore[misc]
        loop.run_epochs(1)
    assert loop.auto.choose(is_fixed=True) == 32


def test_a_fixed_number_stays_where_dear_and_cheap_epochs_alternate() -> None:
    loop = Loop(AutoWorkers(workers=2, most=2, most_waiting=32), 2, lambda workers: 60, busy=0.03)
    loop.run_epochs(2)
    had = []
    for epoch in range(8):
        loop.work_ms = lambda workers, epoch=epoch: 60 if epoch % 2 else 5  # type: ignore[misc]
        had += loop.run_epochs(1)
    assert set(had) == {28}


def test_a_fixed_number_is_no_more_than_pay_for_their_start() -> None:
    loop = Loop(AutoWorkers(workers=2, most=2, most_waiting=32), 0, lambda workers: 48, busy=0.01)
    assert loop.run_epochs(3, batches=32)[-1] == 8


@pytest.mark.parametrize(
    ("work_ms", "busy", "batches", "most", "wanted"),
    [
        pytest.param(100, 1.0, 1000, 99, 2, id="computes: one on each core, whatever the step"),
        pytest.param(100, 0.6, 1000, 99, 2, id="computes more than it waits"),
        pytest.param(100, 1.0, 1000, 1, 1, id="computes, and the memory holds one"),
        pytest.param(0.1, 1.0, 100, 99, 1, id="computes so little that a second one is not worth its start"),
        pytest.param(100, 0.01, 1000, 99, 32, id="waits"),
        pytest.param(100, 0.25, 1000, 99, 14, id="as many as keep two cores busy, and as many more that wait"),
        pytest.param(100, 0.01, 20, 99, 10, id="no more than pay for their start: 2 s of work, 20 ms each"),
        pytest.param(100, 0.01, 1000, 5, 5, id="no more than the memory holds"),
        pytest.param(0.01, 0.01, 10, 99, 1, id="hardly any work"),
        pytest.param(80, 0.05, 1000, 99, 32, id="2 ms of its computing is a worker's beginning"),
    ],
)
def test_only_a_first_batch_that_waits_gets_more_workers_than_cores(work_ms, busy, batches, most, wanted) -> None:
    auto = AutoWorkers(workers=1, most=2, most_waiting=32)
    assert auto.is_guess
    auto.plan_first(int(work_ms * MS), int(busy * work_ms * MS), batches=batches, most=most)
    assert auto.workers == wanted
    assert not auto.is_guess


def test_a_guess_that_is_enough_stays() -> None:
    auto = AutoWorkers(workers=7, most=8, most_waiting=32)
    auto.plan_first(100 * MS, MS, batches=10, most=99)
    assert auto.workers == 7


def test_workers_that_persist_pay_for_their_start_over_several_epochs() -> None:
    planned = []
    for is_persistent in (False, True):
        auto = AutoWorkers(workers=1, most=2, most_waiting=32)
        auto.is_persistent = is_persistent
        auto.plan_first(100 * MS, MS, batches=20, most=99)
        planned.append(auto.workers)
    assert planned == [10, 20]


@pytest.mark.parametrize(
    ("workers", "step_ms", "handling_ms", "wait_ms", "work_ms", "leaves"),
    [
        pytest.param(2, 0, 0.1, 0.3, 0.05, True, id="fetching is all of the time"),
        pytest.param(1, 0, 0.1, 0.3, 0.05, True, id="and a second worker fetches as slowly"),
        pytest.param(1, 0, 0.1, 2, 1, False, id="a second worker may do"),
        pytest.param(2, 0, 0.1, 0.9, 2, False, id="two make more than one process"),
        pytest.param(2, 5, 0.1, 0, 0.05, False, id="the step hides it"),
        pytest.param(2, 0, 0.1, 3, 200, False, id="samples wait"),
    ],
)
def test_batches_that_cost_less_than_fetching_them_are_left_to_the_training_process(
    workers: int, step_ms: float, handling_ms: float, wait_ms: float, work_ms: float, leaves: bool
) -> None:
    auto = AutoWorkers(workers=workers, most=2, most_waiting=32)
    assert not auto.why_no_workers()
    for _ in range(20):
        auto.note(timing(step_ms, work_ms, wait_ms=wait_ms, handling_ms=handling_ms))
    assert bool(auto.why_no_workers()) is leaves
    auto.is_persistent = True
    assert not auto.why_no_workers()
    auto.is_persistent, auto.must_stay = False, True  # samples leave something, or one has killed its worker
    assert not auto.why_no_workers()


def test_what_the_last_look_of_an_epoch_has_shown_tells_whether_workers_are_left() -> None:
    auto = AutoWorkers(workers=2, most=2)
    while not auto._last.batches:
        auto.observe(timing(0, 0.05, wait_ms=3, handling_ms=0.1))
    assert "making a batch takes" in auto.why_no_workers()
