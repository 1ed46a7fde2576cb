"""Dispatch decides which worker gets which batch, and how many batches may be under way."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.loader.scheduling.dispatch_policy import Dispatch, Mode

SLOW_NS = 30_000_000
"""A batch that is worth filling together."""


def make_dispatch(mode: Mode, **options: Any) -> Dispatch:
    dispatch = Dispatch(mode, "", **{"workers": 2, "prefetch_factor": 2, "splittable": True, **options})
    dispatch.begin_epoch()
    return dispatch


@pytest.mark.parametrize(
    ("mode", "batch_ns", "parts"), [("demand", SLOW_NS, 2), ("demand", 1000, 1), ("round_robin", SLOW_NS, 1)]
)
def test_a_batch_is_split_when_its_parts_keep_a_worker_busy(mode: Mode, batch_ns: int, parts: int) -> None:
    dispatch = make_dispatch(mode)
    dispatch.learn(batch_ns)
    assert dispatch.split(64) == parts


def test_all_workers_fill_the_first_batch_and_show_what_it_costs() -> None:
    dispatch = make_dispatch("demand", workers=3)
    assert (dispatch.split(64), dispatch.window()) == (3, 1)
    dispatch.learn(1000)
    assert (dispatch.split(64), dispatch.window()) == (1, 6)
    again = make_dispatch("demand", workers=3, previous=dispatch)
    assert (again.split(64), again.window()) == (1, 6)


def test_a_batch_is_never_split_into_rows_of_one() -> None:
    dispatch = make_dispatch("demand", workers=8)
    dispatch.learn(SLOW_NS)
    assert dispatch.split(5) == 2


def test_the_window_is_two_for_batches_filled_together_and_widens_with_lost_time() -> None:
    dispatch = make_dispatch("demand")
    dispatch.learn(SLOW_NS)
    assert dispatch.window() == 2
    dispatch.starved(SLOW_NS // 2)
    assert dispatch.window() == 2
    dispatch.starved(SLOW_NS)
    assert dispatch.window() == 3
    for _ in range(10):
        dispatch.starved(2 * SLOW_NS)
    assert dispatch.window() == 4


def test_more_workers_than_a_batch_has_parts_have_one_each() -> None:
    dispatch = make_dispatch("demand", workers=48, cores=2)
    dispatch.learn(100_000_000)  # parts of 36 ms or more, where 48 share two cores
    assert dispatch.split(64) == 2
    assert dispatch.window() == 48 // 2 + 1


def test_time_lost_long_ago_is_forgotten() -> None:
    dispatch = make_dispatch("demand")
    dispatch.learn(SLOW_NS)
    assert dispatch.window() == 2
    for _ in range(1000):
        dispatch.learn(SLOW_NS)
        dispatch.starved(SLOW_NS // 100)
    assert dispatch.window() == 2


def test_where_each_worker_keeps_to_its_own_batches_the_window_widens_for_all_of_them_and_is_kept() -> None:
    dispatch = make_dispatch("round_robin", may_run_ahead=True)
    dispatch.learn(SLOW_NS)
    seen = []
    for _ in range(9):
        seen.append(dispatch.window())
        dispatch.starved(8 * SLOW_NS + 1)
    assert seen == [4, 6, 8, 10, 12, 14, 16, 16, 16]
    assert dispatch.drawn_ahead == 4
    assert make_dispatch("round_robin", may_run_ahead=True, previous=dispatch).window() == 16


def test_where_the_sampler_could_tell_the_window_is_torchs() -> None:
    dispatch = make_dispatch("round_robin")
    dispatch.learn(SLOW_NS)
    dispatch.starved(100 * SLOW_NS)
    assert dispatch.window() == 4


def test_in_order_the_next_active_worker_is_always_next() -> None:
    dispatch = make_dispatch("round_robin", workers=3)
    assert [dispatch.next_taker(in_order=True, most=6) for _ in range(4)] == [0, 1, 2, 0]
    dispatch.active[1] = False
    assert dispatch.next_taker(in_order=True, most=6) == 2
    dispatch.active = [False] * 3
    assert dispatch.next_taker(in_order=True, most=6) is None


def test_out_of_order_a_worker_with_its_share_is_passed_over() -> None:
    dispatch = make_dispatch("round_robin", workers=2)
    dispatch.load = [2, 1]
    assert dispatch.next_taker(in_order=False, most=4) == 1
    dispatch.load = [2, 2]
    assert dispatch.next_taker(in_order=False, most=4) is None


@pytest.mark.parametrize(("cores", "parts"), [(64, 32), (32, 32), (2, 6)])
def test_of_more_workers_than_cores_each_gets_longer_parts(cores: int, parts: int) -> None:
    dispatch = make_dispatch("demand", workers=64, cores=cores)
    dispatch.learn(320_000_000)
    assert dispatch.split(64) == parts
