"""Dispatch decides which worker gets which batch, and how many batches may be under way."""

from __future__ import annotations

import pytest

from penstock.loader.scheduling.dispatch_policy import Dispatch, Mode

SLOW_NS = 30_000_000
"""A batch that is worth filling together."""


def make_dispatch(mode: Mode, *, workers: int = 2, prefetch_factor: int = 2, splittable: bool = True) -> Dispatch:
    dispatch = Dispatch(mode, "", workers=workers, prefetch_factor=prefetch_factor, splittable=splittable)
    dispatch.begin_epoch()
    return dispatch


def test_without_worker_dependence_probing_ends_in_demand() -> None:
    dispatch = make_dispatch("probing")
    assert dispatch.split(64) == 2
    dispatch.decide("")
    assert dispatch.mode == "demand"


def test_with_worker_dependence_it_ends_in_torchs_assignment_for_good() -> None:
    dispatch = make_dispatch("probing")
    dispatch.decide("the samples draw from torch's state")
    dispatch.decide("")
    assert dispatch.mode == "round_robin"
    assert dispatch.split(64) == 1


def test_worker_dependence_detected_late_changes_the_assignment_and_the_reason_says_so() -> None:
    dispatch = make_dispatch("demand")
    dispatch.decide("the dataset reads get_worker_info()")
    assert dispatch.mode == "round_robin"
    assert "noticed late" in dispatch.reason


@pytest.mark.parametrize(
    ("mode", "batch_ns", "parts"), [("demand", SLOW_NS, 2), ("demand", 1000, 1), ("stream", SLOW_NS, 1)]
)
def test_a_batch_is_split_when_its_parts_keep_a_worker_busy(mode: Mode, batch_ns: int, parts: int) -> None:
    dispatch = make_dispatch(mode)
    dispatch.learn(batch_ns)
    assert dispatch.split(64) == parts


def test_a_batch_is_never_split_into_rows_of_one() -> None:
    dispatch = make_dispatch("demand", workers=8)
    dispatch.learn(SLOW_NS)
    assert dispatch.split(5) == 2


def test_the_window_is_two_for_batches_filled_together_and_widens_with_lost_time() -> None:
    dispatch = make_dispatch("demand")
    assert dispatch.window() == 4
    dispatch.learn(SLOW_NS)
    assert dispatch.window() == 2
    dispatch.starved(SLOW_NS // 2)
    assert dispatch.window() == 2
    dispatch.starved(SLOW_NS)
    assert dispatch.window() == 3
    for _ in range(10):
        dispatch.starved(2 * SLOW_NS)
    assert dispatch.window() == 4


def test_time_lost_long_ago_is_forgotten() -> None:
    dispatch = make_dispatch("demand")
    dispatch.learn(SLOW_NS)
    assert dispatch.window() == 2
    for _ in range(1000):
        dispatch.learn(SLOW_NS)
        dispatch.starved(SLOW_NS // 100)
    assert dispatch.window() == 2


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
