"""The scheduler on a pool without processes: order, crashes, timeouts and cancelled epochs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_pool import FakePool
from torch.utils.data import default_collate

from penstock.core.errors import WorkerKilledError, WorkerStartError, WorkerTimeoutError
from penstock.core.shared_segment import PrivateSegment
from penstock.loader.counters import Counters
from penstock.loader.scheduling.dispatch import Dispatch, Mode
from penstock.loader.scheduling.scheduler import Scheduler
from penstock.loader.transport.ring import Ring
from penstock.loader.workers.messages import Result
from penstock.loader.workers.pool import WorkerCrash
from penstock.loader.workers.worker_spec import ErrorPolicy, WorkerSpec


class Rows:
    """Sample i is 5000 times the number i."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((5000,), index)


def make_spec(errors: ErrorPolicy = "raise") -> WorkerSpec:
    return WorkerSpec(
        dataset=Rows(), collate_fn=default_collate, iterable=False, auto_collation=True, drop_last=False, errors=errors
    )


def make_scheduler(pool: FakePool, spec: WorkerSpec, mode: Mode = "demand", **arguments: Any) -> Scheduler:
    options = {"in_order": True, "timeout_s": 0.0, "max_worker_crashes": 2, "counters": Counters(), **arguments}
    dispatch = Dispatch(mode, "", workers=pool.size, prefetch_factor=2)
    ring = Ring(PrivateSegment, 64 << 20)
    scheduler = Scheduler(worker_spec=spec, pool=pool, ring=ring, dispatch=dispatch, **options)
    scheduler.start()
    return scheduler


def a_pass(indices: Iterator[Any]) -> Any:
    """Return what a scheduler asks of an `EpochState`."""
    return SimpleNamespace(indices=indices, epoch_seed=0, shards=(), turn=0)


def batches_of(scheduler: Scheduler, count: int = 6) -> Iterator[list[int]]:
    """Run an epoch of `count` batches of two; yield the numbers of each batch's samples."""
    scheduler.begin(a_pass(iter([[2 * k, 2 * k + 1] for k in range(count)])))
    while True:
        try:
            batch = scheduler.next_batch()
        except StopIteration:
            return
        yield batch[:, 0].tolist()


WHOLE = [[2 * k, 2 * k + 1] for k in range(6)]


@pytest.mark.parametrize("in_order", [True, False])
def test_every_sample_comes_once_and_in_its_place(in_order: bool) -> None:
    spec = make_spec()
    scheduler = make_scheduler(FakePool(spec), spec, in_order=in_order)
    assert list(batches_of(scheduler)) == WHOLE
    assert list(batches_of(scheduler)) == WHOLE


def test_a_crashed_worker_is_replaced_and_its_task_tried_again() -> None:
    spec, counters = make_spec(), Counters()
    pool = FakePool(spec, crash_on={5: 1})
    assert list(batches_of(make_scheduler(pool, spec, counters=counters))) == WHOLE
    assert pool.replaced == [0]
    assert (counters.restarts, counters.retried, counters.quarantined) == (1, 1, [])


def test_a_successor_that_cannot_know_what_its_worker_knew_is_warned_of() -> None:
    spec = make_spec()
    pool = FakePool(spec, crash_on={6: 1})
    with pytest.warns(RuntimeWarning, match="is killed by the test. Its work is done again by a successor"):
        assert list(batches_of(make_scheduler(pool, spec, "round_robin"))) == WHOLE
    assert pool.replaced == [1]


@pytest.mark.parametrize(("mode", "drawn"), [("demand", [4, 5, 6]), ("round_robin", [4, 5, 6])])
def test_the_sampler_is_asked_as_far_ahead_as_torch_asks_it(mode: Mode, drawn: list[int]) -> None:
    spec = make_spec()
    scheduler = make_scheduler(FakePool(spec), spec, mode)
    asked = []

    def indices() -> Iterator[list[int]]:
        for number in range(9):
            asked.append(number)
            yield [2 * number, 2 * number + 1]

    scheduler.begin(a_pass(indices()))
    seen = [len(asked)]
    for _ in range(2):
        scheduler.next_batch()
        seen.append(len(asked))
    assert seen == drawn


def test_a_sample_that_crashes_too_many_workers_raises_in_its_place_and_the_loop_can_continue() -> None:
    spec = make_spec()
    scheduler = make_scheduler(FakePool(spec, crash_on={5: 9}), spec)
    batches = batches_of(scheduler)
    assert [next(batches), next(batches)] == WHOLE[:2]
    with pytest.raises(WorkerKilledError, match="sample 5"):
        next(batches)
    assert scheduler.next_batch()[:, 0].tolist() == WHOLE[3]


def test_with_errors_skip_only_the_sample_that_crashes_workers_is_left_out() -> None:
    spec, counters = make_spec("skip"), Counters()
    scheduler = make_scheduler(FakePool(spec, crash_on={5: 9}), spec, counters=counters)
    assert list(batches_of(scheduler)) == [*WHOLE[:2], [4], *WHOLE[3:]]
    assert (counters.quarantined, counters.skipped_indices) == ([5], [5])


class DyingPool(FakePool):
    """Its workers die before their first task."""

    def collect(self, timeout_s: float | None) -> list[Result | WorkerCrash]:
        return [WorkerCrash(0, 1, "is killed by the test.", [], None, 0)]


def test_workers_that_die_before_their_first_task_end_the_loop_and_close_the_pool() -> None:
    spec = make_spec()
    pool = DyingPool(spec)
    with pytest.raises(WorkerStartError, match="3 workers have ended like this"):
        next(batches_of(make_scheduler(pool, spec)))
    assert pool.calls == ["start", "close"]


def test_workers_that_hang_raise_after_the_timeout() -> None:
    spec = make_spec()
    with pytest.raises(WorkerTimeoutError, match=r"timed out after 0\.5 seconds"):
        next(batches_of(make_scheduler(FakePool(spec, silent=True), spec, timeout_s=0.5)))


def test_batches_that_the_user_keeps_leave_the_workers_as_much_to_do() -> None:
    spec = make_spec()
    pool = FakePool(spec)
    scheduler = make_scheduler(pool, spec)
    scheduler.begin(a_pass(iter([[k] for k in range(30)])))
    kept = [scheduler.next_batch() for _ in range(20)]
    assert scheduler._ring.counts().held == len(kept)
    assert pool.outstanding() == 4


def test_an_epoch_that_is_cancelled_gives_its_slots_back() -> None:
    spec = make_spec()
    pool = FakePool(spec)
    scheduler = make_scheduler(pool, spec)
    next(batches_of(scheduler))
    workers = pool.snapshot()
    assert (pool.size, workers.working, scheduler.count_ready(workers.finished)) == (2, 2, 0)
    assert list(batches_of(scheduler)) == WHOLE
    assert "cancel" in pool.calls
    assert scheduler._ring.counts().held == 0


def test_a_batch_that_the_samplers_error_takes_the_place_of_frees_its_slot() -> None:
    spec = make_spec()
    scheduler = make_scheduler(FakePool(spec), spec)  # which draws 4 batches ahead

    def indices() -> Iterator[list[int]]:
        yield from ([0, 1], [2, 3], [4, 5], [6, 7])
        raise LookupError("no more")

    scheduler.begin(a_pass(indices()))
    with pytest.raises(LookupError, match="no more"):
        scheduler.next_batch()
    assert [scheduler.next_batch()[:, 0].tolist() for _ in range(3)] == WHOLE[1:4]
    with pytest.raises(StopIteration):
        scheduler.next_batch()
    assert scheduler._ring.counts().held == 0
