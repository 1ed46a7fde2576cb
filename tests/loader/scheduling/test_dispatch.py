"""Dispatch decides which worker gets which batch, and how many batches may be under way."""

from __future__ import annotations

from typing import Any

from penstock.loader.scheduling.dispatch import Dispatch, Mode

SLOW_NS = 30_000_000


def make_dispatch(mode: Mode, **options: Any) -> Dispatch:
    dispatch = Dispatch(mode, "", **{"workers": 2, "prefetch_factor": 2, **options})
    dispatch.begin_epoch()
    return dispatch


def test_on_demand_the_window_is_torchs() -> None:
    dispatch = make_dispatch("demand", workers=3)
    dispatch.learn(SLOW_NS)
    dispatch.starved(100 * SLOW_NS)
    assert dispatch.max_in_flight == 6


def test_time_lost_long_ago_is_forgotten() -> None:
    dispatch = make_dispatch("round_robin", may_run_ahead=True)
    assert dispatch.max_in_flight == 4
    for _ in range(1000):
        dispatch.learn(SLOW_NS)
        dispatch.starved(SLOW_NS // 100)
    assert dispatch.max_in_flight == 4


def test_where_each_worker_keeps_to_its_own_batches_the_window_widens_for_all_of_them_and_is_kept() -> None:
    dispatch = make_dispatch("round_robin", may_run_ahead=True)
    dispatch.learn(SLOW_NS)
    seen = []
    for _ in range(9):
        seen.append(dispatch.max_in_flight)
        dispatch.starved(8 * SLOW_NS + 1)
    assert seen == [4, 6, 8, 10, 12, 14, 16, 16, 16]
    assert dispatch.drawn_ahead == 4
    assert make_dispatch("round_robin", may_run_ahead=True, previous=dispatch).max_in_flight == 16


def test_where_the_sampler_could_tell_the_window_is_torchs() -> None:
    dispatch = make_dispatch("round_robin")
    dispatch.learn(SLOW_NS)
    dispatch.starved(100 * SLOW_NS)
    assert dispatch.max_in_flight == 4


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
