"""Memory is measured often at first, and never takes more than a small fraction of the time afterwards."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock.observe.meters import host_memory
from penstock.observe.meters.host_memory import MemoryMeter, descendants


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Stand in for the clocks, and for a measurement that takes 40 ms of CPU."""
    now = {"wall": 0.0, "cpu": 0.0, "measurements": 0.0}

    def measure(_: MemoryMeter) -> None:
        now["cpu"] += 0.04
        now["measurements"] += 1

    monkeypatch.setattr(host_memory.time, "monotonic", lambda: now["wall"])
    monkeypatch.setattr(host_memory.time, "thread_time", lambda: now["cpu"])
    monkeypatch.setattr(MemoryMeter, "measure", measure)
    return now


def test_measurements_take_an_eight_hundredth_of_the_time_after_an_initial_allowance(clock: dict[str, float]) -> None:
    meter = MemoryMeter()
    seconds = []
    for second in range(2000):
        clock["wall"] = float(second)
        before = clock["measurements"]
        meter.measure_if_due()
        if clock["measurements"] > before:
            seconds.append(second)
    assert seconds[:3] == [0, 2, 4]
    assert clock["cpu"] <= 2000 / 800 + 0.1 + 0.04
    assert clock["measurements"] > 60


def test_what_is_read_of_this_process_is_plausible() -> None:
    meter = MemoryMeter()
    meter.measure()
    peak = meter.peak()
    assert meter.latest_nbytes is not None
    assert peak.peak_pss_nbytes == meter.latest_nbytes
    assert 1 << 20 < meter.latest_nbytes < peak.peak_rss_nbytes * 2


def test_a_repeated_search_finds_new_children_and_does_not_read_unrelated_processes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    parent = host_memory._parent
    monkeypatch.setattr(host_memory, "_parent", lambda pid: read.append(pid) or parent(pid))
    ours: set[int] = set()
    descendants(os.getpid(), ours)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in descendants(os.getpid(), ours)
        assert child.pid in descendants(os.getpid(), ours)
        childs: set[int] = set()
        descendants(child.pid, childs)
        read.clear()
        assert descendants(child.pid, childs) == []
        assert os.getpid() in childs
        assert os.getpid() not in read
    finally:
        child.communicate(b"\n")
    assert child.pid not in descendants(os.getpid(), ours)
