"""The rule behind num_workers="auto": from what batches show to how many workers there should be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from penstock.loader.scheduling.autoscale import AutoscalePolicy
from penstock.loader.scheduling.worker_limits import BatchTiming

MS = 1_000_000


class Loop:
    """A loop whose step takes `step_ms`, and whose workers take `work_ms(workers)` for a batch; simulated."""

    def __init__(
        self, policy: AutoscalePolicy, step_ms: float, work_ms: Callable[[int], float], handling_ms: float = 0.2
    ):
        self.policy = policy
        self.step_ms, self.work_ms, self.handling_ms = step_ms, work_ms, handling_ms
        self.busy = 1.0
        """The fraction of the work that is not waiting."""
        self.number = 0
        self.history: list[int] = []

    def run(self, batches: int) -> list[int]:
        """Run so many batches; return how many workers there were at each."""
        for _ in range(batches):
            workers = self.policy.workers
            work = self.work_ms(workers)
            loop = self.step_ms + self.handling_ms
            wait = work if workers == 0 else max(0.0, work / workers - loop)
            timing = BatchTiming(
                number=self.number,
                step_ns=int(self.step_ms * MS),
                handling_ns=int(self.handling_ms * MS) if workers else 0,
                wait_ns=int(wait * MS),
                work_ns=int(work * MS),
                busy_ns=int(self.busy * work * MS),
            )
            if self.policy.observe(timing) != workers:
                self.policy.begin(self.number + 1)
            self.number += 1
            self.history.append(self.policy.workers)
        return self.history[-batches:]


def auto(workers: int = 2, most: int = 8) -> AutoscalePolicy:
    return AutoscalePolicy(workers=workers, most=most, fixed=3)


@pytest.mark.parametrize(("work_ms", "wanted"), [(20, 2), (38, 4), (58, 6), (500, 8)])
def test_there_are_as_many_as_the_step_needs_within_20_batches(work_ms: float, wanted: int) -> None:
    assert Loop(auto(), 10, lambda workers: work_ms).run(20)[-1] == wanted


def test_a_cost_that_grows_is_followed_within_20_batches_and_then_it_settles() -> None:
    loop = Loop(auto(), 10, lambda workers: 15)
    assert set(loop.run(100)) == {2}
    loop.work_ms = lambda workers: 45
    assert loop.run(20)[-1] == 5
    assert set(loop.run(300)) == {5}


def test_a_cost_that_falls_is_followed_within_20_batches_and_then_it_settles() -> None:
    loop = Loop(auto(workers=6), 10, lambda workers: 55)
    loop.run(50)
    loop.work_ms = lambda workers: 9
    assert loop.run(20)[-1] == 2
    assert set(loop.run(300)) == {2}


def test_never_more_than_the_most() -> None:
    assert max(Loop(auto(most=3), 1, lambda workers: 1000).run(200)) == 3


def test_workers_that_wait_may_be_as_many_as_their_computing_fills_the_cores() -> None:
    for busy, wanted in ((1.0, 2), (0.6, 3), (0.4, 8), (0.01, 32)):
        loop = Loop(AutoscalePolicy(workers=1, most=2, fixed=1, most_waiting=32), 1, lambda workers: 1000)
        loop.busy = busy
        assert loop.run(200)[-1] == wanted


def test_workers_that_wait_for_each_other_go_and_are_tried_by_ones_after_that() -> None:
    loop = Loop(AutoscalePolicy(workers=1, most=2, fixed=1, most_waiting=32), 1, float)
    loop.busy = 0.02

    def work_ms(workers: int) -> float:
        """Return what a batch takes where only one is made at a time, and a few of each round pass the others."""
        if workers <= 2:
            return 40 * workers
        passes = loop.number % workers < 4
        return 40 * workers * (0.4 if passes else (workers - 1.6) / (workers - 4))

    loop.work_ms = work_ms
    history = [1, *loop.run(500)]
    tried = [now for before, now in pairwise(history) if now > before]
    assert 2 <= len(tried) <= 5
    assert tried[0] > 20
    assert set(tried[1:]) == {2}
    assert history[-1] == 1


@pytest.mark.parametrize("cold_batches", [1, 40])
def test_workers_beyond_the_cores_that_were_kept_by_mistake_go(cold_batches: int) -> None:
    loop = Loop(AutoscalePolicy(workers=1, most=2, fixed=1, most_waiting=32), 1, float)
    loop.busy = 0.02
    # Behind a lock they make no more together, but the batches made before were slow for another reason.
    loop.work_ms = lambda workers: 2000 if loop.number < cold_batches and workers <= 2 else 40 * workers
    history = loop.run(2000)
    assert max(history) == 32
    assert history[-1] <= 4
    assert len({*history[500:]}) <= 6
    assert sum(later != before for before, later in pairwise(history[1000:])) <= 8


def test_workers_that_wait_but_not_for_each_other_are_checked_ever_more_rarely_and_stay() -> None:
    loop = Loop(AutoscalePolicy(workers=1, most=2, fixed=1, most_waiting=32), 1, lambda workers: 1000)
    loop.busy = 0.01
    history = loop.run(8000)
    assert history[-1] == 32
    begun = [at for at, (before, now) in enumerate(pairwise(history)) if before == 32 and now == 16]
    between = [later - before for before, later in pairwise(begun)]
    assert 3 <= len(begun) <= 6
    assert between == sorted(between)
    assert sum(workers != 32 for workers in history[100:]) < 100
    assert "trying" not in loop.policy.reason


def test_workers_that_have_waited_and_now_compute_are_as_many_as_the_cores() -> None:
    loop = Loop(AutoscalePolicy(workers=1, most=2, fixed=1, most_waiting=32), 1, lambda workers: 1000)
    loop.busy = 0.01
    assert loop.run(40)[-1] == 32
    loop.busy = 1.0
    assert loop.run(20)[-1] == 2


@pytest.mark.parametrize("gains", [True, False])
def test_a_fixed_number_beyond_the_cores_stays_if_the_next_epoch_is_faster(gains: bool) -> None:
    policy = AutoscalePolicy(workers=1, most=2, fixed=1, most_waiting=32)

    def epoch(workers: int) -> None:
        speed = workers if gains else 1
        for number in range(100):
            wait_ns, work_ns = 160 * MS // speed, 160 * MS * workers // speed
            policy.epochs.note(
                BatchTiming(number=number, step_ns=MS, handling_ns=0, wait_ns=wait_ns, work_ns=work_ns, busy_ns=MS)
            )

    epoch(1)
    # Batches of 160 ms: 25 workers make 4 each, and take 20 ms each to start; 28 of them would make 4, too.
    assert policy.choose() == 25
    epoch(25)
    assert (policy.choose() >= 25) == gains
    assert gains or (policy.epochs.workers, policy.epochs.reason) == (2, "25 made no more than 1")


def _epochs(policy: AutoscalePolicy, batches_per_s: Callable[[int], float], epochs: int) -> list[int]:
    """Run epochs of 100 batches whose step takes no time; return how many workers each has had."""
    had = []
    for _ in range(epochs):
        workers = policy.choose()
        had.append(workers)
        passed_ns = int(1e9 / batches_per_s(workers))
        timing = BatchTiming(
            number=0, step_ns=1, handling_ns=0, wait_ns=passed_ns, work_ns=workers * passed_ns, busy_ns=workers * MS
        )
        for _ in range(100):
            policy.epochs.note(timing)
    return had


@pytest.mark.parametrize("cold", [1.0, 1.3])
def test_behind_a_lock_a_fixed_number_goes_back_to_where_it_began_and_is_tried_ever_more_rarely(cold: float) -> None:
    policy = AutoscalePolicy(workers=1, most=2, fixed=1, most_waiting=32)
    policy.epochs.plan_first(int(cold * 40 * MS), 4 * MS, batches=100, most=32)
    assert policy.choose() > 10  # a batch computes for a tenth of its time: who could know that the rest is a lock?
    had = _epochs(policy, lambda workers: 25 * (1 - 0.01 * (workers - 1)), 100)
    assert max(had[1:]) <= 3
    assert had.count(2) >= 93
    tried = [epoch for epoch, workers in enumerate(had) if workers == 3]
    assert [later - now for now, later in pairwise(tried)][:2] == [18, 34]


def test_workers_that_persist_pay_for_their_start_over_several_epochs() -> None:
    def planned(*, is_persistent: bool, busy_ms: int = 3) -> int:
        policy = AutoscalePolicy(workers=1, most=2, fixed=1, most_waiting=32)
        policy.epochs.is_persistent = is_persistent
        policy.epochs.plan_first(48 * MS, busy_ms * MS, batches=32, most=32)
        return policy.epochs.workers

    # 32 batches of 48 ms: 8 workers start in 160 ms, and make 4 batches each. With one each, 32 need ten epochs to pay.
    assert (planned(is_persistent=False), planned(is_persistent=True)) == (8, 32)
    # Where they compute there is one for each core.
    assert (planned(is_persistent=False, busy_ms=48), planned(is_persistent=True, busy_ms=48)) == (2, 2)


@pytest.mark.parametrize("work_ms", [0.5, 2.5])
def test_what_a_first_batch_computes_beside_its_samples_does_not_make_cheap_ones_wait(work_ms: float) -> None:
    policy = AutoscalePolicy(workers=1, most=2, fixed=1, most_waiting=32)
    policy.epochs.is_persistent = True
    policy.epochs.plan_first(int(work_ms * MS), int(0.9 * work_ms * MS), batches=256, most=32)
    assert policy.epochs.workers <= 2


def test_a_fixed_number_that_only_seemed_to_bring_nothing_comes_back() -> None:
    policy = AutoscalePolicy(workers=1, most=2, fixed=1, most_waiting=32)
    policy.epochs.plan_first(
        20 * MS, MS, batches=100, most=32
    )  # a first batch that took a quarter of the next ones' time
    first = policy.epochs.workers
    had = _epochs(policy, lambda workers: 12 * min(workers, 6), 10)
    assert had[:3] == [first, 2, first]
    assert had[3] > first  # as fewer made less, more may make more
    assert set(had[4:]) == {first}


def test_within_the_cores_too_a_fixed_number_that_made_less_goes_back() -> None:
    policy = AutoscalePolicy(workers=1, most=16, fixed=2, most_waiting=32)
    assert _epochs(policy, lambda workers: 100 / workers**0.1, 8) == [2, 16, 2, 2, 2, 2, 2, 2]


def test_workers_that_make_no_more_together_go_and_are_tried_ever_more_rarely() -> None:
    history = Loop(auto(), 1, lambda workers: 30 * max(1, workers / 2)).run(2000)
    assert history[-1] == 2
    tried = sum(1 for before, now in pairwise(history) if now > before)
    assert 2 <= tried <= 8
    assert history.count(2) > 1800


def test_a_number_that_did_not_help_is_tried_at_once_when_costs_change() -> None:
    loop = Loop(auto(), 1, lambda workers: 30 * max(1, workers / 2))
    assert loop.run(400)[-1] == 2
    loop.step_ms, loop.work_ms = 30, lambda workers: 110
    assert loop.run(20)[-1] in (4, 5)


def test_batches_that_cost_less_than_fetching_them_need_no_worker_and_expensive_ones_do_again() -> None:
    loop = Loop(auto(), 0.1, lambda workers: 0.05)
    assert loop.run(20)[-1] == 0
    loop.work_ms = lambda workers: 25
    assert loop.run(20)[-1] > 0


def test_a_worker_that_died_keeps_batches_out_of_the_training_process() -> None:
    policy = auto()
    policy.require_worker()
    assert Loop(policy, 0.1, lambda workers: 0.05).run(300)[-1] >= 1


def test_what_the_system_refuses_is_not_asked_again() -> None:
    policy = auto()
    policy.limit(2, "the system starts no more")
    assert set(Loop(policy, 1, lambda workers: 100).run(300)) == {2}
    assert policy.reason == "the system starts no more"


def test_one_slow_batch_in_many_changes_nothing() -> None:
    loop = Loop(auto(), 10, lambda workers: 18)
    loop.run(30)
    loop.work_ms = lambda workers: 60
    loop.run(1)
    loop.work_ms = lambda workers: 18
    assert set(loop.run(100)) == {2}


def test_a_fixed_number_is_chosen_again_from_the_timing_of_an_epoch() -> None:
    policy = auto()
    assert policy.choose() == 3
    waits = BatchTiming(number=0, step_ns=10 * MS, handling_ns=0, wait_ns=6 * MS, work_ns=48 * MS)
    for _ in range(20):
        policy.epochs.note(waits)
    assert policy.choose() == 5
    hides = BatchTiming(number=0, step_ns=10 * MS, handling_ns=0, wait_ns=0, work_ns=12 * MS)
    for workers in (5, 2):  # the epoch after a cheap one may cost as much as the one before
        for _ in range(20):
            policy.epochs.note(hides)
        assert policy.choose() == workers
    assert "filled 1.2 workers" in policy.epochs.reason


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
    policy = AutoscalePolicy(workers=1, most=2, fixed=workers, most_waiting=32)
    step_ns, handling_ns, wait_ns, work_ns = (int(ms * MS) for ms in (step_ms, handling_ms, wait_ms, work_ms))
    assert not policy.epochs.why_no_workers()
    for _ in range(20):
        policy.epochs.note(
            BatchTiming(number=0, step_ns=step_ns, handling_ns=handling_ns, wait_ns=wait_ns, work_ns=work_ns)
        )
    assert bool(policy.epochs.why_no_workers()) is leaves
    policy.epochs.is_persistent = True
    assert not policy.epochs.why_no_workers()
    policy.epochs.is_persistent = False
    policy.require_worker()  # one has crashed
    assert not policy.epochs.why_no_workers()


def _waiting_epochs(policy: AutoscalePolicy, costs_ms: list[float], together: int = 32) -> list[float]:
    """Run an epoch for each cost of a batch, which waits; return how near each was to the best number of workers.

    Of the workers, so many wait side by side; the others wait for them.
    """
    shares = []
    for cost_ms in costs_ms:
        workers = policy.choose()
        batch_ms = max(2.0, cost_ms / min(workers, together))
        timing = BatchTiming(
            number=0,
            step_ns=2 * MS,
            handling_ns=0,
            wait_ns=int((batch_ms - 2.0) * MS),
            work_ns=int(cost_ms * max(1.0, workers / together) * MS),
            busy_ns=int(cost_ms * MS / 32),
        )
        for _ in range(1000):
            policy.epochs.note(timing)
        shares.append(max(2.0, cost_ms / min(32, together)) / batch_ms)
    return shares


def test_a_fixed_number_follows_a_curriculum_whose_epochs_cost_ever_more() -> None:
    policy = AutoscalePolicy(workers=1, most=2, fixed=2, most_waiting=32)
    shares = _waiting_epochs(policy, [5 * 1.3**epoch for epoch in range(16)])
    assert sum(shares[8:]) / 8 > 0.7


def test_a_fixed_number_that_did_not_help_is_tried_again_when_batches_cost_more() -> None:
    policy = AutoscalePolicy(workers=1, most=2, fixed=2, most_waiting=32)
    _waiting_epochs(policy, [40.0] * 6, together=2)
    assert policy.epochs.workers == 2
    assert _waiting_epochs(policy, [400.0] * 3)[-1] > 0.9


def test_a_fixed_number_stays_where_dear_and_cheap_epochs_alternate() -> None:
    policy = AutoscalePolicy(workers=1, most=2, fixed=2, most_waiting=32)
    assert min(_waiting_epochs(policy, [60.0, 5.0] * 6)[2:]) > 0.9
