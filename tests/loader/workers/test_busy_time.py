"""Waiting is told from computing, whatever else runs on the machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from penstock.loader.workers.busy_time import BusyTime, busy_part, process_times

needs_schedstat = pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="Linux tells the times")


def measured(seconds_of, act) -> float:
    busy_time = BusyTime()
    busy_time.begin()
    began = seconds_of()
    passed = time.perf_counter_ns()
    while seconds_of() - began < 0.01:
        act()
    passed = time.perf_counter_ns() - passed
    return busy_time.end(passed) / passed


MS = 1_000_000


@needs_schedstat
def test_a_thread_that_sleeps_waits_and_one_that_computes_is_busy() -> None:
    assert measured(time.monotonic, lambda: time.sleep(0.01)) < 0.5
    assert measured(time.thread_time, lambda: sum(range(1000))) > 0.5


@needs_schedstat
def test_a_process_whose_other_threads_compute_is_busy(monkeypatch) -> None:
    times = process_times(os.getpid())
    assert times is not None
    assert times[0] >= 0
    monkeypatch.setattr("penstock.loader.workers.busy_time.time.process_time_ns", iter([0, 90 * MS]).__next__)
    monkeypatch.setattr("penstock.loader.workers.busy_time.thread_times", lambda: (5 * MS, 0))
    busy_time = BusyTime(with_process=True)
    busy_time.begin()
    assert busy_time.end(100 * MS) == 90 * MS


def test_time_without_a_core_is_neither() -> None:
    assert busy_part(100, 10, 90) == 100  # computes, and gets a tenth of a core
    assert busy_part(100, 1, 90) == 10
    assert busy_part(0, 0, 0) == 0


def test_where_nobody_tells_and_for_short_batches_all_of_it_is_computing(monkeypatch) -> None:
    times = []
    monkeypatch.setattr("penstock.loader.workers.busy_time.thread_times", lambda: times.append(1))
    busy_time = BusyTime()
    for passed in (1_000_000, 5_000_000):
        busy_time.begin()
        assert busy_time.end(passed) == passed
    assert len(times) == 1  # the second was not measured, because the first was short


def test_batches_between_two_measurements_count_like_the_first(monkeypatch) -> None:
    times = iter([(0, 0), (1 * MS, 0), (0, 0), (6 * MS, 0)])
    monkeypatch.setattr("penstock.loader.workers.busy_time.thread_times", lambda: next(times))
    busy_time = BusyTime()
    busy = []
    for passed in (4, 4, 8, 6):  # the second and third are not measured: 12 ms
        busy_time.begin()
        busy.append(busy_time.end(passed * MS) // MS)
    assert busy == [1, 1, 2, 6]
